"""`GET /v1/router` reports the workers and the reasons of routing decisions."""

import pytest

from tests.api.serving import ON_PAIRS, Served


@pytest.mark.skipif(ON_PAIRS, reason="the expected report has a single worker")
def test_a_request_is_listed_with_its_candidates(server: Served) -> None:
    reply = server.post("/v1/completions", prompt=[5, 6, 7], max_tokens=2)
    shown = server.http.get("/v1/router").json()
    assert shown["router"] == "flowguard"
    (worker,) = shown["workers"]
    assert (worker["name"], worker["ready"], worker["starts"]) == ("unified-0", True, 1)
    assert worker["blocks_total"] > 0
    (machine,) = shown["machines"]
    assert (machine["name"], machine["slots"], machine["workers"]) == (worker["host"], None, ["unified-0"])
    decision = next(d for d in shown["decisions"] if d["request"].startswith(reply.json()["id"]))
    assert decision["chosen"] == "unified-0"
    assert decision["prompt_tokens"] == 3
    assert 0 < decision["candidates"][0]["score"] <= 1
    assert decision["seconds_ago"] >= 0
