"""Latency targets over HTTP: in bodies and headers, in usages and metrics."""

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamserve.api.generator import Item
from streamserve.api.metrics.slo_classes import strictness
from streamserve.api.settings import ApiSettings
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.errors import RequestError
from streamserve.protocol.sampling import NO_SLO, SamplingParams, Slo
from streamserve.settings.resolve import resolve
from streamserve.text.latency import SloOutcome
from streamserve.text.output import ChoiceDelta, Usage
from tests.api.serving import ON_PAIRS, ScriptedGenerator, Served, scripted, served

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
}
ROUTES = pytest.mark.parametrize("route", BODIES)


@ROUTES
@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({}, {}, NO_SLO),
        ({"slo": None}, {}, NO_SLO),
        ({"slo": {"tpot_ms": 20, "ttft_ms": None}}, {}, Slo(tpot_ms=20.0)),
        ({}, {"X-SLO-TPOT-MS": "20", "x-slo-ttft-ms": "1.5e3"}, Slo(tpot_ms=20.0, ttft_ms=1500.0)),
        (
            {"slo": {"tpot_ms": 30}},
            {"x-slo-tpot-ms": "20", "x-slo-ttft-ms": "9"},
            Slo(tpot_ms=30.0, ttft_ms=9.0),
        ),
    ],
)  # fmt: skip
def test_bodies_win_over_headers(
    generator: ScriptedGenerator, route: str, body: dict[str, Any], headers: dict[str, str], expected: Slo
) -> None:
    watched = generator.replaced(submitted=[])
    with scripted(watched) as server:
        reply = server.http.post(route, json={**BODIES[route], **body, "priority": 7}, headers=headers)
    assert reply.status_code == 200, reply.text
    (submitted,) = watched.submitted
    assert submitted.params.slo == expected
    assert submitted.options.priority == 7


@ROUTES
@pytest.mark.parametrize("value", [0, -1, "fast", [20], True])
def test_a_target_that_is_no_positive_number_is_refused(hello: Served, route: str, value: object) -> None:
    reply = hello.post(route, **BODIES[route], slo={"tpot_ms": value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("slo")


@ROUTES
@pytest.mark.parametrize("value", ["0", "-3", "inf", "nan", "soon", ""])
def test_so_is_a_header(hello: Served, route: str, value: str) -> None:
    reply = hello.http.post(route, json=BODIES[route], headers={"x-slo-ttft-ms": value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "x-slo-ttft-ms"


@ROUTES
def test_so_is_a_number_beyond_all_bounds(hello: Served, route: str) -> None:
    body = json.dumps(BODIES[route])[:-1] + ', "slo": {"tpot_ms": 1e999}}'
    reply = hello.http.post(route, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert "out of range" in reply.json()["error"]["message"]


def test_an_unknown_target_is_refused(hello: Served) -> None:
    assert hello.post("/v1/completions", prompt="hi", slo={"latency": 3}).status_code == 400


def judged(outcome: SloOutcome | None):
    async def script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        yield ChoiceDelta(0, "x", (72, 73, 74), finish="stop")
        yield replace(Usage(len(prompt), 3), slo=outcome)

    return script


@ROUTES
def test_usage_says_whether_targets_were_met(generator: ScriptedGenerator, route: str) -> None:
    with scripted(generator.replaced(script=judged(SloOutcome(False, 12.50004, 3.0)))) as server:
        usage = server.post(route, **BODIES[route], slo={"tpot_ms": 2}).json()["usage"]
    assert (usage["slo_met"], usage["ttft_ms"], usage["tpot_ms"]) == (False, 12.5, 3.0)
    with scripted(generator.replaced(script=judged(None))) as server:
        assert "slo_met" not in server.post(route, **BODIES[route]).json()["usage"]


def test_metrics_count_attainment_and_goodput_by_strictness(generator: ScriptedGenerator) -> None:
    with scripted(generator.replaced(script=judged(SloOutcome(True, 12.5, 3.0)))) as server:
        server.post("/v1/completions", prompt="hi", slo={"tpot_ms": 18})
        server.post("/v1/completions", prompt="hi", slo={"ttft_ms": 18})
        requests, tokens = "slo_requests_total", "slo_goodput_tokens_total"
        for name in ("tpot<=20ms", "ttft"):
            assert server.metric(requests, slo_class=name, met="true") == 1
            assert server.metric(tokens, slo_class=name) == 3
    with scripted(generator.replaced(script=judged(SloOutcome(False, 12.5, 3.0)))) as server:
        server.post("/v1/completions", prompt="hi", slo={"tpot_ms": 5000})
        assert server.metric("slo_requests_total", slo_class="tpot>1000ms", met="false") == 1
        assert server.metric("slo_goodput_tokens_total", slo_class="tpot>1000ms") == 0


@pytest.mark.parametrize(
    ("tpot", "name"), [(0.1, "tpot<=5ms"), (20.0, "tpot<=20ms"), (1000.5, "tpot>1000ms")]
)
def test_classes_of_strictness(tpot: float, name: str) -> None:
    assert strictness(Slo(tpot_ms=tpot)) == name


@ROUTES
def test_the_real_engine_measures(server: Served, route: str) -> None:
    limit = "max_output_tokens" if route.endswith("responses") else "max_tokens"
    body = {**BODIES[route], limit: 8}
    usage = server.post(route, **body, slo={"tpot_ms": 60_000, "ttft_ms": 60_000}).json()["usage"]
    assert usage["slo_met"]
    assert 0 < usage["ttft_ms"] < 60_000
    assert 0 < usage["tpot_ms"] < 60_000
    missed = server.post(route, **body, slo={"ttft_ms": 0.001}).json()["usage"]
    assert not missed["slo_met"]


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
def test_an_infeasible_target_is_refused_with_503_and_when_to_come_again(
    generator: ScriptedGenerator, route: str, stream: bool
) -> None:
    async def refuses(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        raise RequestError("tpot_ms is 1, and 9 could be met", status=503, retry_after=2.5)
        yield Usage(0, 0)

    with scripted(generator.replaced(script=refuses)) as server:
        reply = server.post(route, **BODIES[route], stream=stream, slo={"tpot_ms": 1})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "3")
    assert "9 could be met" in reply.json()["error"]["message"]


@pytest.mark.skipif(ON_PAIRS, reason="on pairs the prefill worker admits requests, by ttft_ms only")
def test_the_real_engine_refuses_what_it_could_not_meet_and_serves_the_rest(checkpoint: Path) -> None:
    async def start() -> AsyncLLM:
        llm = AsyncLLM(
            resolve(
                str(checkpoint), {"threads": 1, "num_blocks": 64, "profile": False, "slo_admission": True}
            )
        )
        await llm.start()
        return llm

    with served(start, ApiSettings()) as server:
        body = {"prompt": "hi", "max_tokens": 8, "ignore_eos": True}
        assert server.post("/v1/completions", **body).status_code == 200, "steps were timed"
        refused = server.post("/v1/completions", **body, slo={"tpot_ms": 1e-6, "ttft_ms": 60_000})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        message = refused.json()["error"]["message"]
        assert "tpot_ms is 1e-06, and " in message
        assert "ttft_ms" not in message
        usage = server.post("/v1/completions", **body, slo={"tpot_ms": 60_000}).json()["usage"]
        assert usage["slo_met"]
