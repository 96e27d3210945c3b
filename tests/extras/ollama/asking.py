"""Requests to Ollama's routes, and models that answer them."""

import json
from pathlib import Path
from typing import Any

import msgspec

from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import Script, ScriptedGenerator, Served
from tests.api.tool_calls import TEMPLATE
from tests.text.folders import byte_level_folder

CHAT, GENERATE = "/api/chat", "/api/generate"
HI: Any = [{"role": "user", "content": "hi"}]


def talker(folder: Path, script: Script) -> ScriptedGenerator:
    """A model whose template has tools, and reasoning that can be disabled."""
    tokenizer = Tokenizer.from_folder(byte_level_folder(folder, chat_template=TEMPLATE))
    generator = ScriptedGenerator(tokenizer, script, served_names=("small",))
    return generator.replaced(model=msgspec.structs.replace(generator.model, max_model_len=4096))


def ask(server: Served, route: str, **body: Any) -> dict[str, Any]:
    """Return the whole reply to a request that is not streamed."""
    response = server.post(route, **{"stream": False, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    reply: dict[str, Any] = response.json()
    return reply


def lines(server: Served, route: str, **body: Any) -> list[dict[str, Any]]:
    """Return the lines of a stream, which is the default."""
    response = server.post(route, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def refusal(server: Served, route: str, status: int = 400, **body: Any) -> str:
    """Return the text of an error, after checking its shape."""
    response = server.post(route, **body)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    return str(response.json()["error"])


def last_prompt(server: Served) -> str:
    """Return the text of the latest prompt."""
    ids = server.llm.submitted[-1].prompt
    return str(server.llm.tokenizer.decode(ids, skip_special_tokens=False))
