"""Requests in the form in which other vendors' clients send them are served, whole or streamed, with no field
refused.

Each file in recorded/ has one request: its client, path, headers and body, written from the client's public
source, and the warning of the reply. In the warning, {left} is what the prompt leaves of the context. The
model's name is replaced. With a `call`, the model calls this function; else it says hello.
"""

import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from streamserve.api.generator import Item
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta, Usage
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import ScriptedGenerator, Served, scripted
from tests.api.tool_calls import TEMPLATE
from tests.text.folders import byte_level_folder

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


CONTEXT = 65_536
HELLO = "hello"


class Model:
    """A model that says `text`, in pieces."""

    def __init__(self) -> None:
        self.text = HELLO

    async def script(self, prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        for start in range(0, len(self.text), 5):
            yield ChoiceDelta(0, self.text[start : start + 5], (72,))
        yield ChoiceDelta(0, tokens=(3,), finish="stop")
        yield Usage(len(prompt), len(self.text))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Model) -> Iterator[Served]:
    """A model with tools and reasoning."""
    folder = byte_level_folder(tmp_path_factory.mktemp("talker"), chat_template=TEMPLATE)
    generator = ScriptedGenerator(Tokenizer.from_folder(folder), model.script)
    long = msgspec.structs.replace(generator.model, max_model_len=CONTEXT)
    with scripted(generator.replaced(model=long)) as running:
        yield running


def events_of(response: httpx.Response) -> list[Any]:
    """Return the JSON values of a reply: one, or those of the events or lines of a stream."""
    if response.headers["content-type"].startswith("application/json"):
        return [response.json()]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def reply_of(events: list[Any]) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text of a reply, and the name and arguments of its calls, as a client of its API reads
    them."""
    text, calls = "", []
    for event in events:
        if "object" in event and event["object"].startswith("chat.completion"):
            for choice in event["choices"]:
                message = choice.get("message") or choice["delta"]
                text += message.get("content") or ""
                for call in message.get("tool_calls", ()):
                    if "name" in call["function"]:
                        calls.append([call["function"]["name"], ""])
                    calls[-1][1] += call["function"]["arguments"]
        elif "created_at" in event and "done" in event:
            message = event.get("message", {"content": event.get("response")})
            text += message["content"]
            for call in message.get("tool_calls", ()):
                calls.append([call["function"]["name"], json.dumps(call["function"]["arguments"])])
        else:
            for item in event.get("output", event.get("response", {}).get("output", ())):
                if event.get("type") in ("response.completed", None):
                    text += "".join(part["text"] for part in item.get("content", ()))
                    calls += [[item["name"], item["arguments"]]] if item["type"] == "function_call" else []
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def test_all_clients_are_there() -> None:
    clients = {json.loads(path.read_text())["client"] for path in RECORDED}
    assert clients == {
        "Claude Code",
        "Cline",
        "Continue",
        "LangChain",
        "LiteLLM",
        "Open WebUI",
        "Zed",
    }


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("stream", [True, False])
def test_recorded_requests_are_served(server: Served, model: Model, path: Path, stream: bool) -> None:
    recorded: Any = json.loads(path.read_text(encoding="utf-8"))
    call = recorded.get("call")
    model.text = f"<tool_call>{json.dumps(call)}</tool_call>" if call else HELLO
    body = {**recorded["body"], "model": "scripted", "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    response = server.http.post(recorded["path"], json=body, headers=recorded["headers"])
    assert response.status_code == 200, response.text
    if "anthropic-version" in recorded["headers"] or recorded["path"] == "/v1/messages":
        assert HELLO in response.text
    else:
        text, calls = reply_of(events_of(response))
        assert text.strip() == ("" if call else HELLO)
        assert calls == ([(call["name"], call["arguments"])] if call else [])
    streamed = "application/x-ndjson" if recorded["path"].startswith("/api/") else "text/event-stream"
    assert response.headers["content-type"].startswith(streamed) == stream
    left = CONTEXT - len(server.llm.submitted[-1].prompt)
    assert response.headers.get("warning", "") == recorded["warning"].replace("{left}", str(left))


IMAGE = "data:image/png;base64,iVBORw0KGgo="
IMAGES: dict[str, tuple[str, Any]] = {
    "Zed": ("/v1/chat/completions", [{"type": "image_url", "image_url": {"url": IMAGE}}]),
    "Cline": (
        "/v1/chat/completions",
        [{"type": "text", "text": "See:"}, {"type": "image_url", "image_url": {"url": IMAGE}}],
    ),
    "Continue": (
        "/v1/chat/completions",
        [{"type": "image_url", "image_url": {"url": IMAGE, "detail": "auto"}}, {"type": "text", "text": "?"}],
    ),
    "Zed, responses": ("/v1/responses", [{"type": "input_image", "image_url": IMAGE}]),
}


@pytest.mark.parametrize("client", IMAGES)
def test_images_are_refused_by_name(server: Served, client: str) -> None:
    route, content = IMAGES[client]
    field = "input" if route.endswith("responses") else "messages"
    before = len(server.llm.submitted)
    response = server.post(route, **{field: [{"role": "user", "content": content}]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert "image" in error["message"]
    assert len(server.llm.submitted) == before


def test_images_of_ollamas_api_are_refused_by_name(server: Served) -> None:
    """Open WebUI and Continue send the base64 text in a list of the message."""
    message = {"role": "user", "content": "See:", "images": [IMAGE.partition(",")[2]]}
    response = server.post("/api/chat", messages=[message])
    assert response.status_code == 400
    assert "images is not supported" in response.json()["error"]


def test_nothing_of_claude_codes_conversation_is_lost(server: Served, model: Model) -> None:
    model.text = HELLO
    recorded: Any = json.loads((RECORDED[0].parent / "claude_code.json").read_text())
    server.http.post(recorded["path"], json={**recorded["body"], "model": "scripted"})
    ids = server.llm.submitted[-1].prompt
    prompt = server.llm.tokenizer.decode(ids, skip_special_tokens=False)
    body = recorded["body"]
    texts = [block["text"] for block in body["system"][1:]] + [tool["name"] for tool in body["tools"]]
    for text in (
        *texts,
        "<think>The user wants a listing.</think>",
        "setup.py",
        "not been read yet",
        "180000",
    ):
        assert text in prompt
    assert prompt.count("<|im_start|>tool") == 2
