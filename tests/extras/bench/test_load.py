"""The load client measures times, counts and errors correctly, against scripted servers."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from streamserve.extras.bench.client import Target
from streamserve.extras.bench.errors import BenchError
from streamserve.extras.bench.load import Run, run_load
from streamserve.extras.bench.workloads import WorkloadPrompt
from tests.extras.bench.fake import answering, streaming

PROMPT = WorkloadPrompt((1, 2, 3), 4)
TEXT = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}\n\n'
DONE = b"data: [DONE]\n\n"


def load(url: str, prompts: Sequence[WorkloadPrompt] = (PROMPT,), **options: Any) -> Run:
    arrivals = options.pop("arrivals", [0.0] * len(prompts))
    return asyncio.run(run_load(Target(url, "some"), prompts, arrivals, **options))


def test_a_request_is_timed_from_its_sending_to_each_text() -> None:
    with answering(streaming(0.1, TEXT, 0.2, TEXT, USAGE, 0.1, DONE)) as url:
        (outcome,) = load(url).outcomes
    assert outcome.error is None
    assert outcome.ttft == pytest.approx(0.1, abs=0.08)
    assert outcome.itl == [pytest.approx(0.2, abs=0.08)]
    assert outcome.latency == pytest.approx(0.4, abs=0.12)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.counted) == (3, 4, False)
    assert outcome.tpot == pytest.approx((outcome.latency - outcome.token_times[0]) / 3)


def test_events_are_counted_if_no_usage_is_reported() -> None:
    with answering(streaming(TEXT, TEXT, TEXT, DONE)) as url:
        (outcome,) = load(url).outcomes
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.counted) == (None, 3, True)


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ((TEXT,), "no [DONE]"),
        ((TEXT, b'data: {"error": {"message": "lost"}}\n\n', DONE), "lost"),
        ((b"data: {]\n\n", DONE), "DecodeError"),
    ],
)
def test_an_incomplete_reply_is_an_error(parts: tuple[bytes, ...], error: str) -> None:
    with answering(streaming(*parts)) as url:
        (outcome,) = load(url).outcomes
    assert outcome.error is not None
    assert error in outcome.error


def test_a_refusal_keeps_its_status_and_message() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, text="come back later")

    with answering(refuse) as url:
        (outcome,) = load(url).outcomes
    assert outcome.error == "429: come back later"


def test_no_server_is_an_error_of_each_request() -> None:
    run = load("http://127.0.0.1:1", [PROMPT, PROMPT])
    assert [outcome.error is None for outcome in run.outcomes] == [False, False]


def test_requests_are_sent_at_their_arrival_times() -> None:
    with answering(streaming(TEXT, USAGE, DONE)) as url:
        run = load(url, [PROMPT] * 3, arrivals=[0.0, 0.2, 0.4])
    sent = sorted(outcome.sent for outcome in run.outcomes)
    late = [time - due for time, due in zip(sent, (0.0, 0.2, 0.4), strict=True)]
    assert all(-0.01 < seconds < 20 for seconds in late)  # never early; a busy machine may be late


def test_never_more_requests_are_open_than_allowed_and_waiting_is_not_timed() -> None:
    open_now, maximum = 0, 0

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal open_now, maximum
        open_now += 1
        maximum = max(maximum, open_now)
        await asyncio.sleep(0.1)
        open_now -= 1
        return web.Response(body=TEXT + USAGE + DONE)

    with answering(slow) as url:
        run = load(url, [PROMPT] * 6, max_concurrency=2)
    assert maximum == 2
    assert run.duration >= 0.3
    assert sum(outcome.latency for outcome in run.outcomes) <= 2 * run.duration  # two requests at a time


@pytest.mark.parametrize(
    ("endpoint", "content", "sent"),
    [
        ("completions", "hi", {"prompt": "hi", "max_tokens": 4}),
        ("completions", (1, 2), {"prompt": [1, 2], "max_tokens": 4}),
        ("chat", "hi", {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 4}),
        ("chat", ({"role": "user", "content": "x"},), {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_request_bodies(endpoint: Any, content: Any, sent: dict[str, Any]) -> None:
    target = Target("http://here/v1/", "some", endpoint, ignore_eos=True, extra_body={"top_p": 0.5})
    assert target.url.startswith("http://here/v1/c")
    body = json.loads(target.body(WorkloadPrompt(content, 4)))
    expected = {"model": "some", "stream": True, "temperature": 0.0, "ignore_eos": True, "top_p": 0.5, **sent}
    assert body.items() >= expected.items()
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(("endpoint", "content"), [("chat", (1, 2)), ("completions", ({"role": "user"},))])
def test_a_prompt_that_does_not_fit_the_endpoint_is_refused(endpoint: Any, content: Any) -> None:
    with pytest.raises(BenchError, match="cannot be sent to"):
        Target("http://here", "some", endpoint).body(WorkloadPrompt(content, 4))


def test_the_key_is_only_in_the_header() -> None:
    seen = []

    async def record_key(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return web.Response(body=TEXT + USAGE + DONE)

    with answering(record_key) as url:
        run = load(url, api_key="sk-very-secret")
        load(url)
    assert seen == ["Bearer sk-very-secret", None]
    assert "secret" not in repr(run)


def test_the_client_uses_little_time_per_event(record: Any) -> None:
    """The client takes little time per event, so that it is not the bottleneck: 300 concurrent requests with
    20 events each."""
    with answering(streaming(*[TEXT] * 20, USAGE, DONE)) as url:
        started = time.process_time()
        run = load(url, [PROMPT] * 300)
        # The time includes the scripted server, which shares this process.
        seconds = time.process_time() - started
    assert [outcome.error for outcome in run.outcomes] == [None] * 300
    assert sum(len(outcome.token_times) for outcome in run.outcomes) == 6000
    record(client_and_server_microseconds_per_event=round(seconds / 6000 * 1e6))
    assert seconds < 10
