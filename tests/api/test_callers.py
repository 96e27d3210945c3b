"""Objects that one key created are invisible to other keys: on all routes, for every kind of stored object,
and in both headers that carry a key."""

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from starlette.routing import Route, WebSocketRoute

from streamserve.api.app import create_app
from streamserve.api.generator import Generator, Item
from streamserve.api.settings import ApiSettings
from streamserve.contracts.embedding import EmbeddingConfig
from streamserve.fleet.view import DecisionView, RouterView
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.keys import digest
from streamserve.protocol.messages import Pooled
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.resolve import resolve
from streamserve.text.output import ChoiceDelta, Usage
from tests.api.serving import ScriptedGenerator, Served, hello_script, scripted, served, until
from tests.api.stream_socket import call, socket

ONE, TWO, ADMIN = "the-first-key", "the-second-key", "the-admin-key"
KEYS = (digest(ONE), digest(TWO))

Headers = dict[str, str]


def bearer(key: str) -> Headers:
    return {"Authorization": f"Bearer {key}"}


def x_api_key(key: str) -> Headers:
    return {"X-Api-Key": key}


FORMS = pytest.mark.parametrize(
    ("form", "other_form"), [(bearer, x_api_key), (x_api_key, bearer)], ids=["bearer", "x-api-key"]
)
Form = Callable[[str], Headers]

UNENDING = 9
"""With this `max_tokens` an answer begins and does not end during a test."""


async def script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
    if params.max_tokens == UNENDING:
        yield ChoiceDelta(0, "hello", (72,))
        await asyncio.Event().wait()
    async for item in hello_script(prompt, params):
        yield item


@pytest.fixture(scope="module")
def server(generator: ScriptedGenerator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with two keys that stores every kind of object."""
    settings = ApiSettings(
        api_key=KEYS,
        admin_key=(digest(ADMIN),),
        batch_folder=str(tmp_path_factory.mktemp("callers") / "batches"),
    )
    with scripted(generator.replaced(script=script, submitted=[], adapters={}), settings) as running:
        yield running


@pytest.fixture
def watched(generator: ScriptedGenerator) -> Iterator[Served]:
    """A server with two keys. Its generator receives only the test's requests."""
    with scripted(generator.replaced(submitted=[]), ApiSettings(api_key=KEYS)) as running:
        yield running


def made(reply: httpx.Response) -> str:
    """Return the id of the object that a request created."""
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def make_file(server: Served, headers: Headers, max_tokens: int = 2) -> str:
    body = {"prompt": "hi", "max_tokens": max_tokens}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    files = {"file": ("lines.jsonl", json.dumps(line).encode())}
    return made(server.http.post("/v1/files", data={"purpose": "batch"}, files=files, headers=headers))


def make_batch(server: Served, headers: Headers, max_tokens: int = UNENDING) -> str:
    file = make_file(server, headers, max_tokens)
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return made(server.http.post("/v1/batches", json=body, headers=headers))


def make_output(server: Served, headers: Headers) -> str:
    path = f"/v1/batches/{make_batch(server, headers, max_tokens=2)}"
    until(lambda: server.http.get(path, headers=headers).json()["status"] == "completed")
    return str(server.http.get(path, headers=headers).json()["output_file_id"])


def make_response(server: Served, headers: Headers) -> str:
    return made(server.http.post("/v1/responses", json={"input": "hi"}, headers=headers))


def make_stream(server: Served, headers: Headers) -> str:
    body = {"query": "x", "max_tokens": 2, "answer_early": True}
    return made(server.http.post("/v1/streams", json=body, headers=headers))


class Use(NamedTuple):
    """A request that uses a stored object; {id} in it stands for the object's id."""

    kind: str
    method: str
    path: str
    body: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return " ".join((self.kind, self.method, self.path, *(self.body or ())))

    def ask(self, server: Served, name: str, headers: Headers) -> httpx.Response:
        content = json.dumps(self.body).replace("{id}", name) if self.body is not None else None
        path = self.path.replace("{id}", name)
        return server.http.request(self.method, path, content=content, headers=headers)


MAKERS = {
    "file": make_file,
    "batch": make_batch,
    "output of a batch": make_output,
    "response": make_response,
    "prompt stream": make_stream,
}
APPEND = {"version": 0, "operations": [{"op": "append", "text": "a"}]}
USES = [
    Use("file", "GET", "/v1/files/{id}"),
    Use("file", "GET", "/v1/files/{id}/content"),
    Use(
        "file",
        "POST",
        "/v1/batches",
        {"input_file_id": "{id}", "endpoint": "/v1/completions", "completion_window": "24h"},
    ),
    Use("file", "DELETE", "/v1/files/{id}"),
    Use("batch", "GET", "/v1/batches/{id}"),
    Use("batch", "POST", "/v1/batches/{id}/cancel"),
    Use("output of a batch", "GET", "/v1/files/{id}"),
    Use("output of a batch", "GET", "/v1/files/{id}/content"),
    Use("output of a batch", "DELETE", "/v1/files/{id}"),
    Use("response", "GET", "/v1/responses/{id}"),
    Use("response", "GET", "/v1/responses/{id}/input_items"),
    Use("response", "POST", "/v1/responses", {"input": "go on", "previous_response_id": "{id}"}),
    Use("response", "DELETE", "/v1/responses/{id}"),
    Use("prompt stream", "GET", "/v1/streams/{id}"),
    Use("prompt stream", "PATCH", "/v1/streams/{id}", APPEND),
    Use("prompt stream", "POST", "/v1/streams/{id}/finish", {}),
    Use("prompt stream", "POST", "/v1/streams/{id}/finish", {"stream": True}),
    Use("prompt stream", "POST", "/v1/streams/{id}/answer", {}),
    Use("prompt stream", "DELETE", "/v1/streams/{id}"),
]

LISTS = {"/v1/files": make_file, "/v1/batches": make_batch}
"""Routes that list stored objects. Each caller has a separate list."""

MAKING = {("POST", "/v1/files"), ("POST", "/v1/batches"), ("POST", "/v1/responses"), ("POST", "/v1/streams")}
"""Routes that store an object for the caller."""

REPEATED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
}
"""Routes whose outputs workers store by idempotency key, and a request to each route."""

STATELESS = {
    ("POST", path)
    for path in (
        *("/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"),
        *("/v1/messages/count_tokens", "/tokenize", "/detokenize", "/api/embed", "/api/embeddings"),
    )
}
"""Routes that store nothing."""

OF_THE_SERVER = {
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{id}"),
    ("GET", "/v1/router"),
    *(("GET", path) for path in ("/health", "/ping", "/version", "/load", "/metrics", "/docs")),
    *(("GET", path) for path in ("/", "/assets/{version}/{id}", "/openapi.json")),
    *(("GET", path) for path in ("/api/tags", "/api/ps", "/api/version")),
    ("POST", "/api/show"),
}
"""Routes with the same reply for every caller."""

OF_ADMINS = {
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/admin/drain"),
    ("POST", "/admin/resume"),
    ("POST", "/admin/unload"),
    ("POST", "/admin/workers"),
    ("DELETE", "/admin/workers/{worker}"),
    ("POST", "/admin/workers/{worker}/drain"),
    ("POST", "/admin/workers/{worker}/resume"),
}
"""Routes that only an admin key may use."""


def supported_routes(generator: ScriptedGenerator) -> set[tuple[str, str]]:
    """Method and path of every supported route of the application; {name} is written {id}. HEAD is left out:
    its handler is the one of GET."""
    entries = [each for each in create_app(generator).routes if isinstance(each, Route)]
    supported = [e for e in entries if getattr(e.endpoint, "func", e.endpoint).__name__ != "refuse"]
    return {
        (method, entry.path.replace("{name:path}", "{id}").replace("{name}", "{id}"))
        for entry in supported
        for method in (entry.methods or set()) - {"HEAD"}
    }


def test_every_route_is_of_one_caller_or_of_the_server(generator: ScriptedGenerator) -> None:
    """Every route is listed here with the kind of object that it stores or finds. A new route must be
    added."""
    of_callers = {(use.method, use.path) for use in USES} | MAKING
    of_callers |= {("GET", path) for path in LISTS} | {("POST", path) for path in REPEATED}
    assert supported_routes(generator) == of_callers | STATELESS | OF_THE_SERVER | OF_ADMINS
    assert not of_callers & (STATELESS | OF_THE_SERVER | OF_ADMINS)
    assert {use.kind for use in USES} == set(MAKERS)
    sockets = [each.path for each in create_app(generator).routes if isinstance(each, WebSocketRoute)]
    assert sockets == ["/v1/streams/ws"], "test_a_socket_finds_no_prompt_stream_of_another_key"


def seen(reply: httpx.Response, name: str) -> tuple[int, str, set[str]]:
    """Return what a reply reveals about `name`: the status, the text without the name, and the names of its
    headers."""
    return reply.status_code, reply.text.replace(name, "{id}"), set(reply.headers)


@FORMS
@pytest.mark.parametrize("use", USES, ids=str)
def test_what_a_key_made_does_not_exist_for_another(
    server: Served, use: Use, form: Form, other_form: Form
) -> None:
    name = MAKERS[use.kind](server, form(ONE))
    unknown = name[:-8] + "0" * 8
    for headers in (form(TWO), other_form(TWO)):
        refused = use.ask(server, name, headers)
        assert refused.status_code == 404, refused.text
        assert seen(refused, name) == seen(use.ask(server, unknown, headers), unknown)
    allowed = use.ask(server, name, other_form(ONE))
    assert allowed.status_code == 200, "it is there, unchanged, for its key in the other header"
    if (use.method, use.path) == ("PATCH", "/v1/streams/{id}"):
        assert allowed.json()["version"] == 1, "the edit of the other key changed nothing"


@FORMS
@pytest.mark.parametrize("path", LISTS)
def test_lists_have_only_what_the_key_made(server: Served, path: str, form: Form, other_form: Form) -> None:
    name = LISTS[path](server, form(ONE))

    def listed(headers: Headers, query: str = "") -> httpx.Response:
        return server.http.get(f"{path}{query}", headers=headers)

    for headers in (form(TWO), other_form(TWO)):
        assert name not in listed(headers).text
        after, unknown = (listed(headers, f"?after={each}") for each in (name, "unknown"))
        assert seen(after, name) == seen(unknown, "unknown"), (
            "another key's id was accepted as a position in the list"
        )
    assert name in listed(other_form(ONE)).text


def test_an_early_answer_that_is_being_read_is_not_noticed(server: Served) -> None:
    """Another key cannot notice that an early answer is read, although a finish that confirms an early answer
    normally has a different reply."""
    body = {"query": "x", "max_tokens": UNENDING, "answer_early": True}
    name = made(server.http.post("/v1/streams", json=body, headers=bearer(ONE)))
    path = f"/v1/streams/{name}"
    with server.http.stream("POST", f"{path}/answer", json={}, headers=bearer(ONE)) as reading:
        assert reading.status_code == 200
        for stream in (True, False):
            reply = server.http.post(f"{path}/finish", json={"stream": stream}, headers=bearer(TWO))
            assert reply.status_code == 404
        again = server.http.post(f"{path}/answer", json={}, headers=bearer(TWO))
        assert again.status_code == 404
        assert server.http.post(f"{path}/answer", json={}, headers=x_api_key(ONE)).status_code == 409
        assert server.http.delete(path, headers=x_api_key(ONE)).status_code == 200


METHODS = {"get": {}, "edit": APPEND, "finish": {}, "answer": {}, "delete": {}}


@FORMS
@pytest.mark.parametrize("method", METHODS)
def test_a_socket_finds_no_prompt_stream_of_another_key(
    server: Served, method: str, form: Form, other_form: Form
) -> None:
    name = make_stream(server, form(ONE))
    for headers in (form(TWO), other_form(TWO)):
        with socket(server, **headers) as websocket:
            refused, unknown = (
                call(websocket, method, id=each, body=METHODS[method]) for each in (name, "x")
            )
        assert refused["status"] == unknown["status"] == 404
        message = refused["body"]["error"]["message"].replace(name, "x")
        assert message == unknown["body"]["error"]["message"]
    with socket(server, **other_form(ONE)) as websocket:
        reply = call(websocket, method, id=name, body=METHODS[method])
        assert reply.get("status", 200) == 200, reply


def test_a_prompt_stream_of_a_socket_is_of_its_key(server: Served) -> None:
    with socket(server, **x_api_key(ONE)) as websocket:
        name = call(websocket, "create", body={"query": "x", "max_tokens": 2})["body"]["id"]
        assert server.http.get(f"/v1/streams/{name}", headers=bearer(TWO)).status_code == 404
        assert server.http.delete(f"/v1/streams/{name}", headers=x_api_key(TWO)).status_code == 404
        assert server.http.get(f"/v1/streams/{name}", headers=bearer(ONE)).status_code == 200


def keyed(headers: Headers, key: str) -> Headers:
    return {**headers, "Idempotency-Key": key}


@FORMS
def test_idempotent_replies_are_those_of_one_key(server: Served, form: Form, other_form: Form) -> None:
    """Two callers that choose the same idempotency key get neither each other's reply nor a conflict."""
    key = f"shared {form.__name__}"

    def create(headers: Headers, query: str) -> httpx.Response:
        return server.http.post("/v1/streams", json={"query": query}, headers=keyed(headers, key))

    first = made(create(form(ONE), "one"))
    second = made(create(form(TWO), "two"))
    assert first != second
    assert made(create(other_form(ONE), "one")) == first, "a key is the same caller in both headers"
    assert made(create(other_form(TWO), "two")) == second
    assert create(other_form(ONE), "two").status_code == 409


@FORMS
@pytest.mark.parametrize(("method", "path", "body"), [("PATCH", "", APPEND), ("POST", "/finish", {})])
def test_replies_about_a_prompt_stream_are_not_repeated_to_another_key(
    server: Served, method: str, path: str, body: Any, form: Form, other_form: Form
) -> None:
    name = make_stream(server, form(ONE))

    def ask(headers: Headers, body: Any = body) -> httpx.Response:
        return server.http.request(
            method, f"/v1/streams/{name}{path}", json=body, headers=keyed(headers, "k")
        )

    first = ask(form(ONE))
    assert first.status_code == 200
    for headers in (form(TWO), other_form(TWO)):
        assert ask(headers).status_code == 404
        assert ask(headers, {**body, "version": 7}).status_code == 404, (
            "no 409: the other caller's key is unknown here"
        )
    assert ask(other_form(ONE)).text == first.text, "the own caller's reply is repeated"


@FORMS
def test_a_socket_repeats_replies_to_its_key_only(server: Served, form: Form, other_form: Form) -> None:
    fields = {"idempotency_key": f"socket {form.__name__}", "body": {"query": "x"}}
    with socket(server, **form(ONE)) as one, socket(server, **form(TWO)) as two:
        first, second = (call(each, "create", **fields) for each in (one, two))
        with socket(server, **other_form(ONE)) as again:
            assert call(again, "create", **fields)["body"] == first["body"]
    assert first["status"] == second["status"] == 200
    assert first["body"]["id"] != second["body"]["id"]


@pytest.mark.parametrize("route", REPEATED)
def test_kept_outputs_are_those_of_one_key(watched: Served, route: str) -> None:
    """Outputs that workers store for repeated requests are found only by caller and idempotency key
    together."""
    for headers in (bearer(ONE), x_api_key(ONE), bearer(TWO), x_api_key(TWO)):
        reply = watched.http.post(route, json=REPEATED[route], headers=keyed(headers, "kept"))
        assert reply.status_code == 200
    one, one_again, two, two_again = (each.options.idempotency_key for each in watched.llm.submitted)
    assert one == one_again != two == two_again
    assert "" not in (one, two)


def test_a_request_id_that_a_client_chooses_names_nothing(watched: Served) -> None:
    """X-Request-Id appears only in logs: two callers may choose the same id, and no route cancels a request
    by it."""
    for key in (ONE, TWO):
        headers = {**bearer(key), "X-Request-Id": "mine"}
        reply = watched.http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
        assert (reply.status_code, reply.headers["X-Request-Id"]) == (200, "mine")
    one, two = (each.request_id for each in watched.llm.submitted)
    assert one != two
    assert "mine" not in one + two


def test_adapters_are_of_the_server(server: Served) -> None:
    """Adapters belong to the server: an administrator loads them for every key, and no API key changes
    them."""
    adapter = {"lora_name": "poems", "lora_path": "/adapters/poems"}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert server.http.post(path, json=adapter, headers=bearer(ONE)).status_code == 401
    loaded = server.http.post("/v1/load_lora_adapter", json=adapter, headers=bearer(ADMIN))
    assert loaded.status_code == 200
    for headers in (bearer(ONE), x_api_key(TWO)):
        names = [card["id"] for card in server.http.get("/v1/models", headers=headers).json()["data"]]
        assert names == ["scripted", "owner/scripted", "poems"]


def view_of_a_decision() -> RouterView:
    return RouterView("flowguard", [], 0, [DecisionView("stream-1", 1.0, 7, "unified-0", "score", [])])


@pytest.mark.parametrize(("keys", "shown"), [((), "stream-1"), (KEYS[:1], "stream-1"), (KEYS, "")])
def test_the_router_names_no_requests_to_several_tenants(
    generator: ScriptedGenerator, keys: tuple[str, ...], shown: str
) -> None:
    routed = generator.replaced(router_view=view_of_a_decision())
    with scripted(routed, ApiSettings(api_key=keys)) as server:
        (decision,) = server.http.get("/v1/router", headers=bearer(ONE)).json()["decisions"]
    assert decision["request"] == shown
    assert (decision["chosen"], decision["prompt_tokens"]) == ("unified-0", 7)


ONE_AGAIN = "another-key-of-the-first"
TENANTS = (f"{digest(ONE)} first", f"{digest(ONE_AGAIN)} first", digest(TWO))
"""Keys: two of one tenant, and one that is a tenant alone."""


def test_keys_of_one_tenant_are_one_caller(generator: ScriptedGenerator, tmp_path: Path) -> None:
    settings = ApiSettings(api_key=TENANTS, batch_folder=str(tmp_path / "batches"))
    with scripted(generator.replaced(script=script, submitted=[]), settings) as server:
        for kind, make in MAKERS.items():
            name = make(server, bearer(ONE))
            use = next(use for use in USES if use.kind == kind and use.method == "GET")
            statuses = [use.ask(server, name, bearer(key)).status_code for key in (ONE, ONE_AGAIN, TWO)]
            assert statuses == [200, 200, 404], kind
        streams = [
            server.http.post("/v1/streams", json={"query": "x"}, headers=keyed(bearer(key), "k")).json()["id"]
            for key in (ONE, ONE_AGAIN, TWO)
        ]
        assert streams[0] == streams[1] != streams[2]


def test_open_requests_are_counted_by_key_and_not_by_tenant(generator: ScriptedGenerator) -> None:
    settings = ApiSettings(api_key=TENANTS, max_requests_per_key=1)
    with scripted(generator, settings) as server, socket(server, **bearer(ONE)):
        statuses = [
            server.http.get("/v1/models", headers=bearer(key)).status_code for key in (ONE, ONE_AGAIN, TWO)
        ]
    assert statuses == [429, 200, 200]


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Served]:
    """A server with these keys and the real engine."""

    async def start() -> Generator:
        settings = {"served_model_name": ["tiny"], "threads": 1, "num_blocks": 512}
        llm = AsyncLLM(resolve(str(checkpoint), settings))
        await llm.start()
        return llm

    with served(start, ApiSettings(api_key=TENANTS)) as running:
        yield running


def complete(server: Served, key: str) -> httpx.Response:
    body = {"prompt": list(range(100, 164)), "max_tokens": 1, "temperature": 0.0}
    return server.http.post("/v1/completions", json=body, headers=bearer(key))


def complete_stream(server: Served, key: str) -> httpx.Response:
    body = {
        "query": "",
        "template": "a long prefix " * 16 + "{context}{query}",
        "max_tokens": 1,
        "temperature": 0.0,
    }
    name = made(server.http.post("/v1/streams", json=body, headers=bearer(key)))
    return server.http.post(f"/v1/streams/{name}/finish", json={}, headers=bearer(key))


def cached_tokens(reply: httpx.Response) -> int:
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("send", [complete, complete_stream])
def test_prefixes_are_those_of_one_tenant(
    engine: Served, send: Callable[[Served, str], httpx.Response]
) -> None:
    """A cached prefix is found only by requests of the tenant that sent it, in both directions."""
    replies = [send(engine, key) for key in (ONE, ONE, ONE_AGAIN, TWO, TWO, ONE)]
    first, again, same_tenant, other, other_again, last = map(cached_tokens, replies)
    assert first == other == 0
    assert again == same_tenant == other_again == last >= 32
    assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1


VECTORS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hi"}, "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/api/embed": {"input": "hi"}, "/api/embeddings": {"prompt": "hi"},
}  # fmt: skip
SALTED = {**REPEATED, **VECTORS}
"""Routes that compute prompts, and a request to each route."""


async def vector_script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
    yield Pooled("", 0, struct.pack("<f", 1.0))
    yield Usage(len(prompt), 0)


def takes_salt(route: str) -> bool:
    """Return whether requests to a route have a field for the cache salt. Ollama's API and rerank's have
    none."""
    return route != "/v1/rerank" and not route.startswith("/api/")


def salt(generator: ScriptedGenerator, route: str, key: str, settings: ApiSettings, **fields: str) -> str:
    """The cache salt of a request with `key`."""
    if route in VECTORS:
        model = msgspec.structs.replace(generator.model, hidden_size=1)
        generator = generator.replaced(embedding=EmbeddingConfig(), script=vector_script, model=model)
    recording = generator.replaced(submitted=[])
    with scripted(recording, settings) as server:
        reply = server.http.post(route, json={**SALTED[route], **fields}, headers=bearer(key))
        assert reply.status_code == 200, reply.text
    (found,) = {each.options.cache_salt for each in recording.submitted}
    return found


@pytest.mark.parametrize("route", SALTED)
def test_every_route_computes_prompts_with_the_salt_of_its_tenant(
    generator: ScriptedGenerator, route: str
) -> None:
    settings = ApiSettings(api_key=TENANTS)
    one, same, two = (salt(generator, route, key, settings) for key in (ONE, ONE_AGAIN, TWO))
    assert one == same != two
    if takes_salt(route):
        mine, theirs = (salt(generator, route, key, settings, cache_salt="s") for key in (ONE, TWO))
        assert len({one, two, mine, theirs}) == 4


@pytest.mark.parametrize("route", SALTED)
@pytest.mark.parametrize(
    "settings",
    [
        ApiSettings(),
        ApiSettings(api_key=TENANTS[:1]),
        ApiSettings(api_key=TENANTS[:2]),
        ApiSettings(api_key=TENANTS, share_prefixes=True),
    ],
    ids=["no key", "one key", "one tenant", "share_prefixes"],
)
def test_one_tenant_and_those_that_share_prefixes_have_no_salt(
    generator: ScriptedGenerator, route: str, settings: ApiSettings
) -> None:
    assert salt(generator, route, ONE, settings) == ""
    if takes_salt(route):
        assert salt(generator, route, ONE, settings, cache_salt="s") == "s"


def test_without_keys_there_is_one_caller(generator: ScriptedGenerator, tmp_path: Path) -> None:
    """Without keys, headers that look like keys do not distinguish callers, since they are not checked."""
    with scripted(generator, ApiSettings(batch_folder=str(tmp_path / "batches"))) as server:
        made_by = [{}, bearer(ONE), x_api_key(TWO)]
        names = [
            made(server.http.post("/v1/streams", json={"query": "x"}, headers=keyed(headers, "k")))
            for headers in made_by
        ]
        assert len(set(names)) == 1
        file = make_file(server, bearer(ONE))
        for headers in made_by:
            assert server.http.get(f"/v1/files/{file}", headers=headers).status_code == 200
            assert server.http.get(f"/v1/streams/{names[0]}", headers=headers).status_code == 200
