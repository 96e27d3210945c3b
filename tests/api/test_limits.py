"""Limits on a single request, and on all open requests together."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator

import msgspec
import pytest

from streamserve.api.generator import Item
from streamserve.api.http.json_scan import MAX_DEPTH, JsonScan
from streamserve.api.openai.scores import check_scores
from streamserve.api.settings import ApiSettings
from streamserve.protocol.errors import RequestError
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta, Usage
from tests.api.serving import ScriptedGenerator, Served, scripted, until

COMPLETIONS = "/v1/completions"


def nested(levels: int) -> object:
    value: object = 1
    for level in range(levels):
        value = [value, 2] if level % 2 else {"a": 0, "b": value}
    return value


def test_depth_has_a_limit() -> None:
    JsonScan().feed(json.dumps(nested(MAX_DEPTH)).encode())
    with pytest.raises(RequestError, match=f"at most {MAX_DEPTH} levels"):
        JsonScan().feed(json.dumps(nested(MAX_DEPTH + 1)).encode())


def test_depth_is_checked_in_every_field(hello: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"x": nested(80)}}
    reply = hello.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert "nested too deeply" in reply.json()["error"]["message"]


def test_choices_of_all_prompts_together_have_a_limit(hello: Served) -> None:
    reply = hello.post(COMPLETIONS, prompt=["a"] * 9, n=128)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "n")
    assert "n is 128 for 9 prompts: at most 1024" in error["message"]
    assert hello.post(COMPLETIONS, prompt=["a"] * 8, n=128).status_code == 200


def test_a_whole_reply_holds_so_many_log_probabilities() -> None:
    many = SamplingParams(n=1, logprobs=64, max_tokens=None)
    check_scores([many], [100], 8100, whole=True)
    check_scores([many], [100], 9000, whole=False)
    check_scores([SamplingParams(n=128, max_tokens=None)] * 8, [1] * 8, 1 << 20, whole=True)
    with pytest.raises(RequestError, match="524288 is the limit") as refused:
        check_scores([many], [100], 9000, whole=True)
    assert refused.value.field == "logprobs"
    with pytest.raises(RequestError):
        check_scores([many, many], [100, 100], 8100, whole=True)


def test_no_output_has_no_log_probabilities() -> None:
    """A limit of 0 tokens is respected: it does not count as the whole context."""
    check_scores([SamplingParams(n=128, logprobs=64, max_tokens=0)] * 8, [10] * 8, 1 << 20, whole=True)


def test_log_probabilities_of_prompts_count_too() -> None:
    """Log-probabilities of prompts count towards the limit; a prompt of 8192 tokens may have all of them."""
    one = SamplingParams(prompt_logprobs=64, max_tokens=1)
    check_scores([one], [8192], 8193, whole=True)
    for params, prompts in (([one] * 16, [2000] * 16), ([msgspec.structs.replace(one, n=4)], [8000])):
        with pytest.raises(RequestError, match="1048576 is the limit") as refused:
            check_scores(params, prompts, 8193, whole=False)
        assert refused.value.field == "prompt_logprobs"


def test_a_stream_may_have_as_many_as_it_likes(generator: ScriptedGenerator) -> None:
    wide = generator.replaced(model=msgspec.structs.replace(generator.model, max_model_len=1 << 20))
    with scripted(wide) as server:
        body = {"prompt": "hi", "n": 4, "logprobs": 64, "max_tokens": 100_000}
        assert server.post(COMPLETIONS, **body).json()["error"]["param"] == "logprobs"
        assert server.post(COMPLETIONS, **body, stream=True).status_code == 200


def test_all_requests_together_hold_a_bounded_memory(generator: ScriptedGenerator) -> None:
    """Requests hold memory for their parsed content while they run. A request beyond the limit is asked to
    retry later; a small request still fits."""
    release = threading.Event()

    async def waits(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        await asyncio.to_thread(release.wait)
        yield ChoiceDelta(0, "x", (72,), finish="stop")
        yield Usage(len(prompt), 1)

    body = {"prompt": "hi", "user": "u" * 1_000_000}
    held = generator.replaced(script=waits, submitted=[])
    with scripted(held, ApiSettings(max_memory_bytes=6_000_000)) as server:
        statuses: list[int] = []

        def post() -> None:
            statuses.append(server.post(COMPLETIONS, **body).status_code)

        threads = [threading.Thread(target=post) for _ in range(3)]
        for number, thread in enumerate(threads, start=1):
            thread.start()
            until(lambda number=number: len(held.submitted) == number)  # type: ignore[misc]
        refused = server.post(COMPLETIONS, **body, suffix="u" * 1_000_000)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert "max_memory_bytes" in refused.json()["error"]["message"]
        small = threading.Thread(
            target=lambda: statuses.append(server.post(COMPLETIONS, prompt="hi").status_code)
        )
        small.start()
        until(lambda: len(held.submitted) == 4)
        release.set()
        for thread in (*threads, small):
            thread.join()
        assert statuses == [200] * 4
        assert server.post(COMPLETIONS, **body).status_code == 200
        never = server.post(COMPLETIONS, prompt=["u" * 1_000_000] * 7)
        assert (never.status_code, never.json()["error"]["type"]) == (413, "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
def test_requests_have_a_deadline(generator: ScriptedGenerator, stream: bool) -> None:
    closed = []

    async def slow(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        try:
            if params.n > 1:
                yield ChoiceDelta(0, "begun", (72,))
            await asyncio.sleep(60)
            yield ChoiceDelta(0, "late", (72,))
        finally:
            closed.append(True)

    message = "the request took longer than 1 seconds, which is the limit (request_timeout)"
    with scripted(generator.replaced(script=slow), ApiSettings(request_timeout=1)) as server:
        reply = server.post(COMPLETIONS, prompt="hi", stream=stream)
        assert (reply.status_code, reply.json()["error"]["message"]) == (504, message)
        reply = server.post(COMPLETIONS, prompt=["hi", "ho"], n=2, stream=stream)
        assert message in reply.text
        assert reply.status_code == (200 if stream else 504)
        assert len(closed) == 3
        assert server.metric("requests_total", finish_reason="abort") > 0
