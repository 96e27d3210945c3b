"""Requests in the form in which other vendors' clients send them are served, whole or streamed, with no field
refused.

Each file in recorded/ has one request: its client, path, headers and body, written from the client's public
source. The model's name is replaced.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import ScriptedGenerator, Served, scripted
from tests.api.tool_calls import TEMPLATE, says
from tests.text.folders import byte_level_folder

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model with tools and reasoning, which says hello."""
    folder = byte_level_folder(tmp_path_factory.mktemp("talker"), chat_template=TEMPLATE)
    generator = ScriptedGenerator(Tokenizer.from_folder(folder), says("hello"))
    model = msgspec.structs.replace(generator.model, max_model_len=65_536)
    with scripted(generator.replaced(model=model)) as running:
        yield running


def test_all_clients_are_there() -> None:
    clients = {json.loads(path.read_text())["client"] for path in RECORDED}
    assert clients == {"Claude Code", "LangChain", "LiteLLM", "Open WebUI"}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("stream", [True, False])
def test_recorded_requests_are_served(server: Served, path: Path, stream: bool) -> None:
    recorded: Any = json.loads(path.read_text(encoding="utf-8"))
    body = {**recorded["body"], "model": "scripted", "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    response = server.http.post(recorded["path"], json=body, headers=recorded["headers"])
    assert response.status_code == 200, response.text
    assert "hello" in response.text
    streamed = "application/x-ndjson" if recorded["path"].startswith("/api/") else "text/event-stream"
    assert response.headers["content-type"].startswith(streamed) == stream
    assert response.headers.get("warning", "") == recorded["warning"]


def test_nothing_of_claude_codes_conversation_is_lost(server: Served) -> None:
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
