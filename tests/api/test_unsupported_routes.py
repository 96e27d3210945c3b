"""Unsupported routes of other servers' APIs and misspelled paths get an error that says what to use
instead."""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.api.refusing import refused
from tests.api.serving import Served


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("POST", "/embeddings", "use /v1/embeddings"),
        ("POST", "/v1/audio/speech", "only generates and embeds text"),
        ("POST", "/v1/images/generations", "only generates and embeds text"),
        ("POST", "/v1/moderations", "only generates and embeds text"),
        ("POST", "/v1/responses/", "use /v1/responses"),
        ("GET", "/v1/files/file-1/lines", "/v1/files/{id}/content"),
        ("GET", "/v1/vector_stores", "send the whole conversation"),
        ("POST", "/v1/responses/resp_1/cancel", "/v1/responses/{id}/input_items"),
        ("POST", "/v1/responses/compact", "ask the model for a summary"),
        ("PUT", "/v1/batches/batch_1/pause", "/v1/batches/{id}/cancel"),
    ],
)
def test_unsupported_routes_are_refused(hello: Served, method: str, path: str, message: str) -> None:
    error = refused(hello.http.request(method, path, json={} if method == "POST" else None), 404)
    assert error["message"].startswith(f"{path} is not supported: ")
    assert message in error["message"]


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.moderations.create(input="a"),
        lambda client: client.responses.cancel("resp_1"),
        lambda client: client.audio.speech.create(model="scripted", voice="alloy", input="a"),
    ],
)
def test_the_client_raises_its_own_error(hello: Served, call: Callable[[openai.OpenAI], Any]) -> None:
    with pytest.raises(openai.NotFoundError, match="is not supported: "):
        call(hello.client)


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "/openai/v1/responses", "/v1/responses"),
        ("POST", "//v1//messages", "/v1/messages"),
        ("GET", "/models", "/v1/models"),
        ("GET", "/v1/health", "/health"),
        ("POST", "/v1/chatcompletions", "/v1/chat/completions"),
        ("POST", "/v1/chat/completion", "/v1/chat/completions"),
        ("POST", "/v1/completion", "/v1/completions"),
        ("POST", "/V1/Chat/Completions", "/v1/chat/completions"),
    ],
)
def test_a_wrong_path_is_answered_with_the_right_one(
    hello: Served, method: str, path: str, meant: str
) -> None:
    error = refused(hello.http.request(method, f"{hello.url}{path}"), 404)
    assert error["message"] == f"there is no route {method} {path}: use {meant}"


def test_a_path_near_no_route_has_no_hint(hello: Served) -> None:
    paths = (
        ("GET", "/v1/poems"),
        ("DELETE", "/chat/completions"),
        ("GET", "/v1/completion"),
        ("POST", "/audio/speech"),
        ("POST", f"/v1/{'x' * 9999}"),
    )
    for method, path in paths:
        message = refused(hello.http.request(method, path), 404)["message"]
        assert message == f"there is no route {method} {path}"


def test_a_supported_route_is_not_covered(hello: Served) -> None:
    assert hello.post("/v1/responses", input="hi").status_code == 200
    assert refused(hello.http.get("/v1/responses"), 405)["message"] == "/v1/responses does not take GET"
