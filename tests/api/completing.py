"""Requests to /v1/completions, whole and as a stream."""

import json
from typing import Any

from tests.api.serving import Served

PROMPT = "the quick brown fox"


def complete(server: Served, **body: Any) -> Any:
    """Return the single choice of a completion, as JSON."""
    response = server.post("/v1/completions", **{"prompt": PROMPT, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def events(server: Served, **body: Any) -> list[Any]:
    """Return the events of a stream without [DONE]."""
    lines = server.post("/v1/completions", **{"prompt": PROMPT, "stream": True, **body}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
