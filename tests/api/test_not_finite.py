"""A request whose model outputs are not finite gets an error, and other requests are unaffected."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from streamserve.api.generator import Generator
from streamserve.llm.async_llm import AsyncLLM
from streamserve.settings.resolve import resolve
from tests.api.serving import Served, served, until
from tests.overflowing import TOKEN, make_overflowing

COMPLETIONS = "/v1/completions"
GOOD = [[4 + number, *range(10, 30)] for number in range(6)]
HEAD = list(range(40, 90))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_overflowing(tmp_path_factory.mktemp("overflowing"))

    async def start() -> Generator:
        drafting = {"draft": "ngram", "speculation_policy": "fixed:4"}
        flags: dict[str, Any] = {"threads": 1, "num_blocks": 256, **drafting}
        llm = AsyncLLM(resolve(str(folder), flags))
        await llm.start()
        return llm

    with served(start) as running:
        yield running


def ask(server: Served, prompt: list[int], **fields: Any) -> httpx.Response:
    body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return server.http.post(COMPLETIONS, json={**body, "model": server.llm.settings.name, **fields})


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["text"]
    return content


def test_it_is_one_error_and_the_others_go_on(server: Served) -> None:
    alone = [text(ask(server, prompt)) for prompt in GOOD]
    before = server.metric("corrupted_requests_total")
    bad = [[*HEAD, TOKEN, number] for number in range(4)]
    with ThreadPoolExecutor(16) as pool:
        mixed = [prompt for pair in zip(GOOD, [*bad, *bad], strict=False) for prompt in pair]
        replies = list(pool.map(lambda prompt: ask(server, prompt), mixed))
    assert [text(reply) for reply in replies[::2]] == alone
    for reply in replies[1::2]:
        assert reply.status_code == 500
        assert "not finite" in reply.json()["error"]["message"]
    # A minimum: reports about an earlier test's requests may arrive after `before` was read.
    until(lambda: server.metric("corrupted_requests_total") >= before + len(replies[1::2]))
    assert "vllm:corrupted_requests_total" in server.http.get("/metrics").text
    assert server.http.get("/health").status_code == 200


def test_a_stream_ends_with_an_error_event(server: Served) -> None:
    """The bad token is generated as an output, so the stream has already sent tokens before the error."""
    fields = {"stream": True, "allowed_token_ids": [TOKEN], "max_tokens": 5}
    lines = ask(server, GOOD[0], **fields).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "choices" in events[0]
    assert "not finite" in events[-1]["error"]["message"]
    prompt = ask(server, GOOD[0], allowed_token_ids=[TOKEN], max_tokens=1)
    assert prompt.status_code == 200, "the prompt alone has finite outputs"


def test_log_probabilities_of_the_prompt_are_refused(server: Served) -> None:
    reply = ask(server, [9, TOKEN, 8, 7], prompt_logprobs=1)
    assert reply.status_code == 500
    assert "not finite" in reply.json()["error"]["message"]
