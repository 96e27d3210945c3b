"""Requests that are repeated with an Idempotency-Key get the same text, also from another server."""

from typing import Any

import pytest

from streamserve.api.settings import ApiSettings
from streamserve.protocol.keys import digest
from tests.api.serving import ScriptedGenerator, Served, scripted

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
}
ROUTES = pytest.mark.parametrize("route", BODIES)


@ROUTES
def test_the_key_chooses_the_seed_unless_the_body_has_one(generator: ScriptedGenerator, route: str) -> None:
    seeds = []
    for _ in range(2):  # two servers, one started after the other
        watched = generator.replaced(submitted=[])
        with scripted(watched) as server:
            for key in ("a", "b", None):
                headers = {"idempotency-key": key} if key else {}
                assert server.http.post(route, json=BODIES[route], headers=headers).status_code == 200
            body = BODIES[route] | {"seed": 7}
            server.http.post(route, json=body, headers={"idempotency-key": "a"})
        seeds.append([submitted.params.seed for submitted in watched.submitted])
    assert seeds[0][:2] == seeds[1][:2]
    assert seeds[0][0] != seeds[0][1]
    assert None not in seeds[0][:2]
    assert seeds[0][2] is None, "without an idempotency key the engine chooses the seed"
    assert seeds[0][3] == 7
    keys = [submitted.options.idempotency_key for submitted in watched.submitted]
    assert keys == ["/a", "/b", "", "/a"], "the engine stores outputs by idempotency key"


@ROUTES
def test_the_same_key_of_another_client_is_another_key(generator: ScriptedGenerator, route: str) -> None:
    """A stored output is not found by another client's request with the same key: a faster reply would reveal
    what the first client has asked."""
    watched = generator.replaced(submitted=[])
    with scripted(watched, ApiSettings(api_key=(digest("one"), digest("two")))) as server:
        for client in ("one", "two", "one"):
            headers = {"idempotency-key": "a", "authorization": f"Bearer {client}"}
            assert server.http.post(route, json=BODIES[route], headers=headers).status_code == 200
    first, other, again = (submitted.options.idempotency_key for submitted in watched.submitted)
    assert first == again != other
    assert len({submitted.params.seed for submitted in watched.submitted}) == 1


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_without_characters_or_with_too_many_is_refused(hello: Served, key: str) -> None:
    route = "/v1/completions"
    reply = hello.http.post(route, json=BODIES[route], headers={"idempotency-key": key})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "Idempotency-Key"
