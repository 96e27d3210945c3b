"""Checks of the shape of an error response, and requests that servers refuse."""

from typing import Any

import httpx

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"

USER = {"role": "user", "content": "hi"}


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Return the error of a response, after checking its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" if status < 500 else "server_error"
    return error
