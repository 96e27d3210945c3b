"""Requests from web pages of other sites are refused (CORS)."""

import pytest

from streamserve.api.settings import ApiSettings
from tests.api.serving import ScriptedGenerator, Served, scripted

EVIL, APP = "https://evil.example", "https://app.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-more",
}


def test_a_page_of_another_site_cannot_submit_requests(generator: ScriptedGenerator) -> None:
    """A plain form is sent without a preflight request, so the request itself must be refused."""
    with scripted(generator) as server:
        before = len(generator.submitted)
        headers = {"Origin": EVIL, "Content-Type": "text/plain"}
        reply = server.http.post("/v1/completions", content='{"prompt": "hi"}', headers=headers)
        assert reply.status_code == 403
        assert "--cors-origin" in reply.json()["error"]["message"]
        assert len(generator.submitted) == before
        assert server.http.get("/v1/models", headers={"Origin": "null"}).status_code == 403


def test_cors_is_off_by_default(hello: Served) -> None:
    reply = hello.http.options("/v1/completions", headers={"Origin": EVIL, **PREFLIGHT})
    assert reply.status_code == 403
    assert not [name for name in hello.http.get("/v1/models").headers if name.startswith("access-control")]


def test_a_page_of_the_same_origin_may_call(hello: Served) -> None:
    assert hello.http.get("/v1/models", headers={"Origin": hello.url}).status_code == 200


def test_an_allowed_origin_may_call_and_others_may_not(generator: ScriptedGenerator) -> None:
    with scripted(generator, ApiSettings(cors_origin=(APP,))) as server:
        preflight = server.http.options("/v1/completions", headers={"Origin": APP, **PREFLIGHT})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == APP
        assert "x-more" in preflight.headers["access-control-allow-headers"]
        reply = server.http.post("/v1/completions", json={"prompt": "hi"}, headers={"Origin": APP})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, APP)
        assert "X-Request-Id" in reply.headers["access-control-expose-headers"]
        assert server.http.get("/v1/models", headers={"Origin": EVIL}).status_code == 403


def test_a_star_allows_all(generator: ScriptedGenerator) -> None:
    with scripted(generator, ApiSettings(cors_origin=("*",))) as server:
        reply = server.http.get("/v1/models", headers={"Origin": EVIL})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("rebound.example:8000", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
def test_a_local_server_without_key_answers_to_local_names(
    generator: ScriptedGenerator, host: str, status: int
) -> None:
    """Other host names are refused: a page whose DNS name was rebound to 127.0.0.1 counts as same-origin."""
    with scripted(generator, ApiSettings(local_only=True)) as server:
        assert server.http.get("/v1/models", headers={"Host": host}).status_code == status
