"""Failures of the engine, and the errors that clients receive."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator

import httpx
import openai
import pytest

from streamserve.api.generator import Item
from streamserve.protocol.errors import RequestError
from streamserve.protocol.reports import IncidentReport
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta
from tests.api.raw_connection import HEAD, connected
from tests.api.serving import ScriptedGenerator, ScriptedHealth, Served, scripted, until

COMPLETIONS = "/v1/completions"


async def busy(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
    raise RequestError("too many requests are waiting", status=429, retry_after=2.5)
    yield


async def broken(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
    raise RuntimeError("secret: /etc/passwd")
    yield


async def lost(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
    yield ChoiceDelta(0, "hel", (72,))
    raise RequestError("the worker was lost", status=503)


async def breaks_later(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
    yield ChoiceDelta(0, "hel", (72,))
    raise RuntimeError("secret: /etc/passwd")


async def aborted(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
    yield ChoiceDelta(0, "hel", (72,))
    yield ChoiceDelta(0, "lo", (73,), finish="abort")


@pytest.mark.parametrize("stream", [False, True])
def test_a_busy_server_says_when_to_retry(generator: ScriptedGenerator, stream: bool) -> None:
    with scripted(generator.replaced(script=busy)) as server:
        response = server.post(COMPLETIONS, prompt="hi", stream=stream)
        assert (response.status_code, response.headers["retry-after"]) == (429, "3")
        assert response.json()["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError, match="too many"):
            server.client.completions.create(model="scripted", prompt="hi", stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_internal_errors_reveal_nothing(generator: ScriptedGenerator, stream: bool) -> None:
    with scripted(generator.replaced(script=broken)) as server:
        response = server.post(COMPLETIONS, prompt="hi", stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lost, "the worker was lost"),
        (breaks_later, "the server failed to handle this request"),
        (aborted, "the server ended this request before it was complete"),
    ],
)
def test_an_error_in_a_stream_is_its_last_event_before_done(
    generator: ScriptedGenerator, script: type, message: str
) -> None:
    with scripted(generator.replaced(script=script)) as server:
        response = server.post(COMPLETIONS, prompt="hi", stream=True)
        *_, last, done, rest = response.text.split("\n\n")
        assert (response.status_code, done, rest) == (200, "data: [DONE]", "")
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == message
        assert "secret" not in response.text
        with pytest.raises(openai.APIError, match=message):
            list(server.client.completions.create(model="scripted", prompt="hi", stream=True))


def test_an_error_halfway_is_no_reply(generator: ScriptedGenerator) -> None:
    for script, status in ((lost, 503), (breaks_later, 500), (aborted, 503)):
        with scripted(generator.replaced(script=script)) as server:
            assert server.post(COMPLETIONS, prompt="hi").status_code == status


def test_failures_are_counted(generator: ScriptedGenerator) -> None:
    with scripted(generator.replaced(script=lost)) as server:
        server.post(COMPLETIONS, prompt="hi")
        assert server.metric("requests_total", finish_reason="error") == 1
    with scripted(generator.replaced(script=busy)) as server:
        server.post(COMPLETIONS, prompt="hi")
        assert server.metric("requests_total", finish_reason="error") == 0


def test_health_reports_the_reason(generator: ScriptedGenerator) -> None:
    loading = ScriptedHealth(ready=False, detail="loading the model", retry_after=6.2)
    with scripted(generator.replaced(health_state=loading)) as server:
        response = server.http.get("/health")
        assert (response.status_code, response.headers["retry-after"]) == (503, "7")
        assert response.json() == {"status": "not ready", "detail": "loading the model"}
        assert server.http.get("/ping").status_code == 200


def test_health_names_the_workers_that_are_missing(generator: ScriptedGenerator) -> None:
    reason = (
        "worker unified-1 does not match the other workers and is not used (2 starts failed): another model"
    )
    degraded = ScriptedHealth(detail="ready", missing=reason)
    with scripted(generator.replaced(health_state=degraded)) as server:
        response = server.http.get("/health")
        assert (response.status_code, response.json()) == (200, {"status": "degraded", "detail": reason})
        assert "retry-after" not in response.headers


def test_incidents_are_metrics_without_a_worker(generator: ScriptedGenerator) -> None:
    incident_report = IncidentReport(deaths=4, suspects=9, convicted=1, quarantined=2)
    with scripted(generator.replaced(latest_report=None, incident_report=incident_report)) as server:
        assert server.metric("worker_deaths_total") == 4
        assert server.metric("requests_suspected_total") == 9
        assert server.metric("requests_given_up_total") == 1
        assert server.metric("num_requests_quarantined") == 2
        assert server.metric("crash_reports_total") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_disconnected_client_frees_its_requests(server: Served, stream: bool, prompts: int) -> None:
    """A client that requests thousands of tokens and disconnects after the first ones frees its sequences."""
    aborts = server.metric("requests_total", finish_reason="abort")
    tokens = server.metric("generation_tokens_total")
    body = json.dumps({"prompt": ["the quick"] * prompts, "max_tokens": 4000, "stream": stream})
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0)) as client:
        client.sendall((head + body).encode())
        until(lambda: server.active_sequences() == prompts)
    until(lambda: server.active_sequences() == 0)
    assert server.llm.report().blocks_live == 0
    until(lambda: server.metric("requests_total", finish_reason="abort") == aborts + prompts)
    assert server.metric("generation_tokens_total") - tokens < 4000 * prompts


def test_a_client_that_disconnects_before_the_first_token(generator: ScriptedGenerator) -> None:
    """A disconnection before the first token is noticed, although the server is sending nothing at that
    time."""
    begun, closed = [], []

    async def slow(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        try:
            begun.append(True)
            await asyncio.sleep(60)
            yield ChoiceDelta(0, "late", (72,))
        finally:
            closed.append(True)

    with scripted(generator.replaced(script=slow)) as server:
        for number, stream in enumerate((True, False), 1):
            body = json.dumps({"prompt": "hi", "stream": stream}).encode()
            with connected(server) as client:
                client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                until(lambda count=number: len(begun) == count)
            until(lambda count=number: len(closed) == count)
        until(lambda: server.metric("requests_total", finish_reason="abort") == 2)
