"""Routes that would change the available models return an error that says what to do instead."""

import pytest

from tests.api.serving import Served


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("POST", "/api/pull", "`streamserve models pull NAME`"),
        ("POST", "/api/push", "publishes no models"),
        ("POST", "/api/create", "`streamserve models quantize`"),
        ("POST", "/api/copy", "--served-model-name"),
        ("DELETE", "/api/delete", "`streamserve models rm NAME`"),
        ("POST", "/api/blobs/sha256:00", "copy the model's files"),
    ],
)
def test_changes_of_models_are_refused(hello: Served, method: str, path: str, message: str) -> None:
    response = hello.http.request(method, path, json={"model": "a"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert error.startswith(f"{path} is not supported: ")
    assert message in error


def test_unknown_routes_have_ollamas_errors(hello: Served) -> None:
    response = hello.http.get("/api/nothing")
    assert (response.status_code, response.json()) == (404, {"error": "there is no route GET /api/nothing"})
    response = hello.http.get("/api/chat")
    assert (response.status_code, response.json()) == (405, {"error": "/api/chat does not take GET"})
