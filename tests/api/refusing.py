"""The shape of an error response, checked, and what tests of refusals send."""

from typing import Any

import httpx

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"

USER = {"role": "user", "content": "hi"}


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response, once its shape is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" if status < 500 else "server_error"
    return error
