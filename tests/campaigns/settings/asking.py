"""Put the requests of a trial to a served model, by each of its ways in, and compare the texts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from streamserve.llm.async_llm import AsyncLLM
from streamserve.llm.items import Item
from streamserve.protocol.errors import RequestError
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import Delta
from tests.campaigns.outcome import UNEXPECTED_5XX, WRONG_TEXT, TrialFailure
from tests.campaigns.settings.workload import Asked

Text = dict[int, tuple[tuple[int, ...], str, str | None]]
"""Of each choice: its tokens, its text, and why it ended."""
BODY_FIELDS = (
    "n", "temperature", "top_k", "top_p", "min_p", "frequency_penalty", "repetition_penalty", "seed",
    "max_tokens", "min_tokens", "ignore_eos",
)  # fmt: skip


@dataclass
class Collected:
    """The choices of one request as they come."""

    tokens: dict[int, list[int]]
    text: dict[int, str]
    finish: dict[int, str | None]

    @classmethod
    def empty(cls, params: SamplingParams) -> "Collected":
        return cls(
            {choice: [] for choice in range(params.n)},
            dict.fromkeys(range(params.n), ""),
            dict.fromkeys(range(params.n)),
        )

    def take(self, item: Item) -> None:
        if isinstance(item, Delta):
            self.tokens[item.choice] += item.tokens
            self.text[item.choice] += item.text
            self.finish[item.choice] = item.finish or self.finish[item.choice]

    def result(self) -> Text:
        return {c: (tuple(self.tokens[c]), self.text[c], self.finish[c]) for c in self.tokens}


async def whole(llm: AsyncLLM, asked: Asked, priority: int = 0) -> Text:
    """Return what a request comes to."""
    return (await _read(_items(llm, asked, priority), asked, None))[0]


async def _items(llm: AsyncLLM, asked: Asked, priority: int) -> AsyncIterator[Item]:
    name = f"trial-{asked.number}"
    if not asked.edits:
        items = llm.submit(asked.prompt, asked.params, request_id=name, priority=priority)
        async with aclosing(items) as stream:
            async for item in stream:
                yield item
        return
    if asked.params.grammar is not None:
        await llm.check_grammar(asked.params.grammar, "grammar")
    params = llm.complete(asked.prompt, asked.params)
    prompt = await llm.open(params, request_id=name, priority=priority)
    try:
        for edit in asked.edits:
            await prompt.edit(edit, 0)
            await asyncio.sleep(0)
        async with aclosing(prompt.answer(asked.prompt, params)) as answer:
            async for item in answer:
                yield item
    finally:
        await prompt.close()


async def _read(items: AsyncIterator[Item], asked: Asked, leave_after: int | None) -> tuple[Text, bool]:
    """Return what came, and whether it is all; after `leave_after` items the request is cancelled."""
    collected, count = Collected.empty(asked.params), 0
    async with aclosing(items) as stream:  # type: ignore[type-var]
        async for item in stream:
            collected.take(item)
            count += 1
            if leave_after is not None and count > leave_after:
                return collected.result(), False
    return collected.result(), True


@dataclass
class Asking:
    """One trial's requests. `expected` are the plain engine's texts by request number; `exact` says of a
    request whether its text must be that one under these settings."""

    llm: AsyncLLM
    http: httpx.AsyncClient
    expected: dict[int, Text]
    settings: Any
    rng: Random
    exact: bool
    greedy_only: bool
    counts: dict[str, int] = field(default_factory=dict)

    async def ask(self, asked: Asked) -> None:
        """Put one request by a way chosen at random. Raises TrialFailure if what comes is wrong."""
        chance, leave, priority = self.rng.random(), self.rng.randrange(6), self.rng.randint(-2, 2)
        plain = not asked.edits and asked.params.grammar is None and asked.params.prompt_logprobs is None
        self._count("requests")
        try:
            if plain and chance < 0.25:
                await self._by_http(asked, stream=False)
                return
            leave_after = leave if chance > 0.88 else None
            got, complete = await _read(_items(self.llm, asked, priority), asked, leave_after)
        except RequestError as error:
            self._refused(asked, error.status, error.message, error.retry_after is not None)
            return
        self._count("streams" if asked.edits else "library")
        if complete:
            self._compare(asked, got)
        else:
            self._count("cancelled")

    async def _by_http(self, asked: Asked, stream: bool) -> None:
        body: dict[str, Any] = {name: getattr(asked.params, name) for name in BODY_FIELDS}
        body |= {"model": self.llm.served_names[0], "prompt": asked.prompt, "stop": list(asked.params.stop)}
        body["logit_bias"] = {str(token): bias for token, bias in asked.params.logit_bias.items()}
        reply = await self.http.post("/v1/completions", json=body)
        if reply.status_code != 200:
            again = "retry-after" in reply.headers
            self._refused(asked, reply.status_code, reply.text, again)
            return
        self._count("http")
        expected = self.expected[asked.number]
        for choice in reply.json()["choices"]:
            _, text, finish = expected[choice["index"]]
            if self._exact(asked) and (choice["text"], choice["finish_reason"]) != (text, finish):
                raise TrialFailure(WRONG_TEXT, f"request {asked.number} by HTTP: {choice} is not {text!r}")
        self._count("compared")

    def _compare(self, asked: Asked, got: Text) -> None:
        expected = self.expected[asked.number]
        if not self._exact(asked):
            return
        self._count("compared")
        if got != expected:
            raise TrialFailure(WRONG_TEXT, f"request {asked.number}: {got} is not {expected}")

    def _exact(self, asked: Asked) -> bool:
        return self.exact and (asked.params.greedy or not self.greedy_only)

    def _refused(self, asked: Asked, status: int, message: str, retry_after: bool) -> None:
        self._count("requests_refused")
        expected = self._expected(asked, status)
        if status >= 500 and not (expected and retry_after):
            raise TrialFailure(UNEXPECTED_5XX, f"request {asked.number}: {status} {message}")
        if not expected:
            raise TrialFailure("refused request", f"request {asked.number}: {status} {message}")

    def _expected(self, asked: Asked, status: int) -> bool:
        """Return whether these settings may refuse this request so."""
        model, server = self.settings.model, self.settings.server
        length = len(asked.prompt) + (asked.params.max_tokens or 0)
        longest = max([len(asked.prompt), *map(len, asked.edits)])
        sequences = [model.max_num_seqs, server.prefill_max_num_seqs, server.decode_max_num_seqs]
        match status:
            case 400 | 404 if status == 400 or asked.edits:  # a stream whose edit did not fit is over
                fits = max(length, longest) <= self.llm.model.max_model_len
                seats = asked.params.n <= min(count for count in sequences if count)
                grammar = asked.params.grammar
                return not fits or not seats or bool(grammar and len(grammar.text) > server.max_grammar_bytes)
            case 413:
                return server.max_body_bytes < 1 << 16
            case 429:
                return server.max_requests <= 60 or server.max_waiting_tokens < 20_000
            case 503:
                return model.slo_admission
        return False

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
