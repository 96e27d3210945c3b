"""The largest legal inputs of every route, by method and path as the router names them.

A server may refuse such an input, as it refuses one that does not fit into the context. It has read and
checked the input by then.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.api.serving import Served
from tests.api.stream_socket import socket

BODY_BYTES = 8 << 20
VALUES = 500_000
NAMES = 130_000
BOUNDARY = "x"


@dataclass(frozen=True)
class Sizes:
    """The sizes of inputs: characters and tokens of a `context`, and the share of the other limits (1: the
    whole limit)."""

    context: int
    part: float

    def __call__(self, limit: int) -> int:
        return int(limit * self.part)


Send = Callable[[Served, Sizes], None]
WORDS = "the quick brown fox jumps over the lazy dog "


def texts(count: int) -> list[str]:
    return [f"{number} a" for number in range(count)]


def words(sizes: Sizes) -> str:
    """A text of about half the context."""
    return (WORDS * (sizes.context // 8))[: 2 * sizes.context]


def unspecific(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Return bodies that are large in each way that JSON can be, in a field that no route knows."""
    yield {"x_values": [1] * sizes(VALUES)}
    yield {"x_names": {str(number): 1 for number in range(sizes(NAMES))}}
    yield {"x_lists": [[]] * sizes(65_000)}
    yield {"x_text": "é" * min(sizes(BODY_BYTES // 3), 8 * sizes.context)}
    yield {"x_escapes": '"' * min(sizes(BODY_BYTES // 3), 8 * sizes.context)}


def grammars(sizes: Sizes) -> Iterator[dict[str, Any]]:
    properties = {f"p{number}": {"type": "string"} for number in range(sizes(1500))}
    schema = {"type": "object", "properties": properties}
    yield {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    yield {"structured_outputs": {"regex": "a?" * sizes(1990)}}
    yield {"structured_outputs": {"choice": [f"{number} " * 8 for number in range(sizes(1000))]}}
    yield {"structured_outputs": {"grammar": "start: /" + "a?" * sizes(20_000) + "/"}}


def generations(sizes: Sizes) -> Iterator[dict[str, Any]]:
    yield from unspecific(sizes)
    yield from grammars(sizes)
    yield {"logit_bias": {str(number): 1 for number in range(sizes(NAMES))}}
    yield {"logit_bias": {f"{number % 300:0{3 + number // 300}}": 1 for number in range(sizes(4000))}}
    yield {"allowed_token_ids": [number % 300 for number in range(sizes(VALUES))]}
    yield {"stop_token_ids": [number % 300 for number in range(sizes(VALUES))]}
    yield {"stop": ["x" * 1000] * 64}


def completions(sizes: Sizes) -> Iterator[dict[str, Any]]:
    for fields in generations(sizes):
        yield {"prompt": "a", "max_tokens": 1, **fields}
    many = {"prompt": [words(sizes)] * max(1, sizes(16)), "n": sizes(64), "max_tokens": 1}
    yield {**many, "echo": True}
    yield {**many, "n": 4, "echo": True, "return_token_ids": True}
    yield {**many, "n": 4, "echo": True, "stream": True}
    yield {"prompt": words(sizes), "n": 4, "echo": True, "logprobs": 5, "max_tokens": 1}
    yield {"prompt": [[1] * (sizes.context // 2)] * max(1, sizes(16)), "echo": True, "max_tokens": 1}
    yield {"prompt": texts(sizes(1024)), "max_tokens": 1}


def chats(sizes: Sizes) -> Iterator[dict[str, Any]]:
    message = {"role": "user", "content": "a"}
    for fields in generations(sizes):
        yield {"messages": [message], "max_tokens": 1, **fields}
    yield {"messages": [message] * (sizes.context // 2), "max_tokens": 1}
    yield {"messages": [{"role": "user", "content": words(sizes)}], "max_tokens": 1, "return_token_ids": True}
    parts = [{"type": "text", "text": "a"}] * min(sizes(30_000), sizes.context)
    yield {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    yield {"messages": [message], "max_tokens": 1, "tools": tools(sizes)}


def tools(sizes: Sizes) -> list[dict[str, Any]]:
    properties = {f"p{number}": {"type": "string", "description": "x" * 50} for number in range(sizes(50))}
    parameters = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(128)]


def responses(sizes: Sizes) -> Iterator[dict[str, Any]]:
    for fields in unspecific(sizes):
        yield {"input": "a", "max_output_tokens": 1, **fields}
    yield {"input": [{"role": "user", "content": "a"}] * (sizes.context // 2), "max_output_tokens": 1}
    yield {"input": words(sizes), "max_output_tokens": 1}


def messages(sizes: Sizes) -> Iterator[dict[str, Any]]:
    one = {"role": "user", "content": "a"}
    for fields in unspecific(sizes):
        yield {"messages": [one], "max_tokens": 1, **fields}
    yield {"messages": [one] * (sizes.context // 2), "max_tokens": 1}
    yield {"messages": [{"role": "user", "content": words(sizes)}], "max_tokens": 1}


def ollama_chats(sizes: Sizes) -> Iterator[dict[str, Any]]:
    one = {"role": "user", "content": "a"}
    options = {"num_predict": 1}
    yield from unspecific(sizes)
    yield {"messages": [one] * (sizes.context // 2), "options": options}
    yield {"messages": [{"role": "user", "content": words(sizes)}], "options": options}
    yield {"messages": [one], "options": options, "tools": tools(sizes)}


def ollama_completions(sizes: Sizes) -> Iterator[dict[str, Any]]:
    yield from unspecific(sizes)
    yield {"prompt": words(sizes), "options": {"num_predict": 1}}
    yield {"prompt": words(sizes), "raw": True, "options": {"num_predict": 1}}


def vectors(field: str, **others: Any) -> Callable[[Sizes], Iterator[dict[str, Any]]]:
    def bodies(sizes: Sizes) -> Iterator[dict[str, Any]]:
        yield from unspecific(sizes)
        yield {field: texts(sizes(VALUES // 4)), **others}
        yield {field: words(sizes), **others}

    return bodies


def tokenized(sizes: Sizes) -> Iterator[dict[str, Any]]:
    yield from unspecific(sizes)
    yield {"prompt": words(sizes), "return_token_strs": True}
    yield {"messages": [{"role": "user", "content": "a"}] * (sizes.context // 2)}


def detokenized(sizes: Sizes) -> Iterator[dict[str, Any]]:
    yield from unspecific(sizes)
    yield {"tokens": [number % 300 for number in range(sizes(VALUES))]}


def streams(sizes: Sizes) -> Iterator[dict[str, Any]]:
    yield from unspecific(sizes)
    yield {"query": words(sizes), "template": "{context}{query}" * 100, "max_tokens": 1}


def edits(sizes: Sizes) -> Iterator[dict[str, Any]]:
    yield from unspecific(sizes)
    added = [{"op": "append", "chunks": [{"id": str(n), "text": "a "}]} for n in range(sizes(20_000))]
    yield {"operations": added}


def posts(path: str, bodies: Callable[[Sizes], Iterator[dict[str, Any]]], method: str = "POST") -> Send:
    """Send each body. The server must answer or refuse the request, and must not fail."""

    def send(server: Served, sizes: Sizes) -> None:
        for body in bodies(sizes):
            data = json.dumps(body, ensure_ascii=False).encode()
            assert len(data) <= BODY_BYTES, next(iter(body))
            headers = {"Content-Type": "application/json"}
            reply = server.http.request(method, path, content=data, headers=headers)
            assert reply.status_code < 500, (list(body), reply.text[:300])

    return send


def plain(path: str, method: str = "GET") -> Send:
    """Send a request without a body. A parameter in the path is made as long as the limit of headers
    allows."""

    def send(server: Served, sizes: Sizes) -> None:
        for name in ("a", "x" * sizes(60_000)) if "NAME" in path else ("",):
            assert server.http.request(method, path.replace("NAME", name)).status_code < 500

    return send


def contents(sizes: Sizes) -> Iterator[bytes]:
    """Return contents of batch files: without requests, with requests far apart, with invalid lines and with
    long lines."""

    def line(number: int, **body: Any) -> bytes:
        request = {"custom_id": str(number), "url": "/v1/completions", "body": {"max_tokens": 1, **body}}
        return json.dumps(request).encode() + b"\n"

    size = sizes(48 << 20)
    yield b"\n" * size
    yield b" \n" * (size // 2)
    yield line(1, prompt="a") + b"\n" * size + line(2, prompt="a")
    yield b"".join(line(number, prompt="a", n="x") for number in range(sizes(1000)))
    yield b"a\n" * (size // 2)
    yield line(1, prompt=[1] * sizes(2_000_000)) * 2


def files(server: Served, sizes: Sizes) -> None:
    """Upload each content."""
    for content in contents(sizes):
        assert upload(server, content).status_code == 200


def upload(server: Served, content: bytes) -> Any:
    return server.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("f.jsonl", content)})


def batches(server: Served, sizes: Sizes) -> None:
    """Create a batch for each content, and wait until it has ended."""
    for content in contents(sizes):
        name = upload(server, content).json()["id"]
        request = {"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = server.http.post("/v1/batches", json=request).json()
        while batch["status"] not in ("completed", "failed"):
            batch = server.http.get(f"/v1/batches/{batch['id']}").json()
        assert server.http.get(f"/v1/files/{name}/content").content == content
        assert server.http.delete(f"/v1/files/{name}").status_code == 200


def stream_socket(server: Served, sizes: Sizes) -> None:
    for body in streams(sizes):
        with socket(server) as websocket:
            websocket.send(json.dumps({"method": "create", **body}))
            websocket.recv(timeout=60)


def prompt_stream(suffix: str, bodies: Callable[[Sizes], Iterator[dict[str, Any]]], method: str) -> Send:
    """Send each body to an open prompt stream."""

    def send(server: Served, sizes: Sizes) -> None:
        name = server.post("/v1/streams", query="a", max_tokens=1).json()["id"]
        posts(f"/v1/streams/{name}{suffix}", bodies, method)(server, sizes)
        server.http.delete(f"/v1/streams/{name}")

    return send


LARGEST: dict[str, Send] = {
    "POST /v1/completions": posts("/v1/completions", completions),
    "POST /v1/chat/completions": posts("/v1/chat/completions", chats),
    "POST /v1/responses": posts("/v1/responses", responses),
    "GET /v1/responses/{id}": plain("/v1/responses/NAME"),
    "DELETE /v1/responses/{id}": plain("/v1/responses/NAME", "DELETE"),
    "GET /v1/responses/{id}/input_items": plain("/v1/responses/NAME/input_items"),
    "POST /v1/messages": posts("/v1/messages", messages),
    "POST /v1/messages/count_tokens": posts("/v1/messages/count_tokens", messages),
    "POST /api/chat": posts("/api/chat", ollama_chats),
    "POST /api/generate": posts("/api/generate", ollama_completions),
    "POST /api/embed": posts("/api/embed", vectors("input")),
    "POST /api/embeddings": posts("/api/embeddings", vectors("prompt")),
    "POST /api/show": posts("/api/show", unspecific),
    **{f"POST /api/{name}": posts(f"/api/{name}", unspecific) for name in ("pull", "push", "create", "copy")},
    "DELETE /api/delete": posts("/api/delete", unspecific, "DELETE"),
    "POST /api/blobs/{digest}": posts("/api/blobs/sha256:0", unspecific),
    **{f"GET /api/{name}": plain(f"/api/{name}") for name in ("tags", "ps", "version")},
    "POST /v1/embeddings": posts("/v1/embeddings", vectors("input")),
    "POST /v1/rerank": posts("/v1/rerank", vectors("documents", query="a")),
    "POST /rerank": posts("/rerank", vectors("documents", query="a")),
    "POST /v2/rerank": posts("/v2/rerank", vectors("documents", query="a")),
    "POST /v1/score": posts("/v1/score", vectors("text_2", text_1="a")),
    "POST /score": posts("/score", vectors("text_2", text_1="a")),
    "POST /v1/load_lora_adapter": posts("/v1/load_lora_adapter", unspecific),
    "POST /v1/unload_lora_adapter": posts("/v1/unload_lora_adapter", unspecific),
    "POST /v1/streams": posts("/v1/streams", streams),
    "PATCH /v1/streams/{name}": prompt_stream("", edits, "PATCH"),
    "GET /v1/streams/{name}": plain("/v1/streams/NAME"),
    "DELETE /v1/streams/{name}": plain("/v1/streams/NAME", "DELETE"),
    "POST /v1/streams/{name}/finish": prompt_stream("/finish", unspecific, "POST"),
    "POST /v1/streams/{name}/answer": prompt_stream("/answer", unspecific, "POST"),
    "WEBSOCKET /v1/streams/ws": stream_socket,
    "POST /v1/files": files,
    "GET /v1/files": plain("/v1/files?limit=10000"),
    "GET /v1/files/{id}": plain("/v1/files/NAME"),
    "GET /v1/files/{id}/content": batches,
    "DELETE /v1/files/{id}": plain("/v1/files/NAME", "DELETE"),
    "POST /v1/batches": batches,
    "GET /v1/batches": plain("/v1/batches?limit=100"),
    "GET /v1/batches/{id}": plain("/v1/batches/NAME"),
    "POST /v1/batches/{id}/cancel": plain("/v1/batches/NAME/cancel", "POST"),
    "POST /tokenize": posts("/tokenize", tokenized),
    "POST /detokenize": posts("/detokenize", detokenized),
    "GET /v1/models": plain("/v1/models"),
    "GET /v1/models/{name:path}": plain("/v1/models/NAME"),
    "GET /v1/router": plain("/v1/router"),
    "GET /health": plain("/health"),
    "GET /ping": plain("/ping"),
    "GET /version": plain("/version"),
    "GET /load": plain("/load"),
    "GET /metrics": plain("/metrics"),
    "POST /admin/drain": posts("/admin/drain", unspecific),
    "POST /admin/resume": posts("/admin/resume", unspecific),
    "POST /admin/unload": posts("/admin/unload?model=NAME", unspecific),
    "POST /admin/workers": posts("/admin/workers", unspecific),
    "DELETE /admin/workers/{worker}": plain("/admin/workers/NAME", "DELETE"),
    "POST /admin/workers/{worker}/drain": posts("/admin/workers/a/drain", unspecific),
    "POST /admin/workers/{worker}/resume": posts("/admin/workers/a/resume", unspecific),
    "GET /": plain("/"),
    "GET /assets/{version}/{name}": plain("/assets/a/NAME"),
    "GET /docs": plain("/docs"),
    "GET /openapi.json": plain("/openapi.json"),
}
"""The largest inputs by method and path. Unsupported routes share a handler that reads no body."""
