"""Send the requests of a trial by library, HTTP and prompt stream, and compare the answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from math import isclose
from random import Random
from typing import Any

import httpx

from streamserve.llm.async_llm import AsyncLLM
from streamserve.llm.items import Item
from streamserve.llm.prompt_stream import LocalPromptStream
from streamserve.protocol.errors import PromptChanged, RequestError
from streamserve.protocol.messages import PromptLogprob, PromptLogprobs
from streamserve.protocol.request_options import RequestOptions
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta, TokenLogprob
from tests.campaigns.outcome import UNEXPECTED_5XX, WRONG_LOGPROBS, WRONG_TEXT, TrialFailure
from tests.campaigns.settings.workload import TrialRequest

Text = dict[int, tuple[tuple[int, ...], str, str | None]]
"""Tokens, text and finish reason by choice."""
ROUNDING = 1e-4
"""Maximum difference of log-probabilities where sums of a batch differ in their last bits."""
EARLY_SECONDS = 0.02
"""Seconds between the edits of a prompt that is answered early: time for some tokens of the answer."""
BODY_FIELDS = (
    "n", "temperature", "top_k", "top_p", "min_p", "frequency_penalty", "repetition_penalty", "seed",
    "max_tokens", "min_tokens", "ignore_eos", "logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The choices of one request, and its requested log-probabilities: of the outputs by choice, and of the
    prompt."""

    text: Text
    logprobs: dict[int, list[TokenLogprob]]
    prompt: list[PromptLogprob]

    @property
    def count(self) -> int:
        """Return the number of tokens with a log-probability."""
        return len(self.prompt) + sum(map(len, self.logprobs.values()))

    def differs_from(self, other: "Answer", exact: bool = True) -> str:
        """Return the kind of difference to another answer, "" if they are equal. Without `exact`,
        log-probabilities need only be close."""
        if self.text != other.text:
            return WRONG_TEXT
        if exact:
            same = (self.logprobs, self.prompt) == (other.logprobs, other.prompt)
        else:
            same = all(
                len(ours) == len(theirs) and all(map(_close, ours, theirs))
                for ours, theirs in zip(self._lists(), other._lists(), strict=True)
            )
        return "" if same else WRONG_LOGPROBS

    def _lists(self) -> list[list[TokenLogprob] | list[PromptLogprob]]:
        return [*self.logprobs.values(), self.prompt]


def _close(one: TokenLogprob | PromptLogprob, other: TokenLogprob | PromptLogprob) -> bool:
    return one.token == other.token and isclose(
        one.logprob, other.logprob, rel_tol=ROUNDING, abs_tol=ROUNDING
    )


@dataclass
class Collected:
    """The choices of one request, as far as they have been received."""

    tokens: dict[int, list[int]]
    text: dict[int, str]
    finish: dict[int, str | None]
    logprobs: dict[int, list[TokenLogprob]]
    prompt: list[PromptLogprob]

    @classmethod
    def empty(cls, params: SamplingParams) -> "Collected":
        return cls(
            {choice: [] for choice in range(params.n)},
            dict.fromkeys(range(params.n), ""),
            dict.fromkeys(range(params.n)),
            {choice: [] for choice in range(params.n)},
            [],
        )

    def add(self, item: Item) -> None:
        if isinstance(item, ChoiceDelta):
            self.tokens[item.choice] += item.tokens
            self.text[item.choice] += item.text
            self.finish[item.choice] = item.finish or self.finish[item.choice]
            self.logprobs[item.choice] += item.logprobs
        elif isinstance(item, PromptLogprobs):
            self.prompt += item.entries

    def result(self) -> Answer:
        text = {c: (tuple(self.tokens[c]), self.text[c], self.finish[c]) for c in self.tokens}
        return Answer(text, self.logprobs, self.prompt)


async def complete_answer(llm: AsyncLLM, request: TrialRequest, priority: int = 0) -> Answer:
    """Return the whole answer to a request."""
    return (await _read(_items(llm, request, priority), request, None))[0]


async def _items(llm: AsyncLLM, request: TrialRequest, priority: int) -> AsyncIterator[Item]:
    name, options = f"trial-{request.number}", RequestOptions(priority, adapter=request.adapter)
    if not request.edits:
        items = llm.submit(request.prompt, request.params, request_id=name, options=options)
        async with aclosing(items) as stream:
            async for item in stream:
                yield item
        return
    if request.params.grammar is not None:
        await llm.check_grammar(request.params.grammar, "grammar")
    params = llm.complete(request.prompt, request.params)
    prompt = await llm.open(params, request_id=name, options=options, answer_early=request.early)
    try:
        for edit in request.edits:
            await prompt.edit(edit, 0)
            await asyncio.sleep(EARLY_SECONDS if request.early else 0)
        if request.early:
            for item in await _final_answer(prompt, request.prompt, params):
                yield item
            return
        async with aclosing(prompt.answer(request.prompt, params)) as answer:
            async for item in answer:
                yield item
    finally:
        await prompt.close()


async def _final_answer(prompt: LocalPromptStream, ids: list[int], params: SamplingParams) -> list[Item]:
    """Finish a prompt that is answered early; return the answer that is not withdrawn."""
    await prompt.edit(ids, 0)
    await prompt.finish()
    while True:
        try:
            async with aclosing(prompt.answer(ids, params)) as answer:
                return [item async for item in answer]
        except PromptChanged:  # the beginning was part of an earlier prompt's answer
            continue


async def _read(
    items: AsyncIterator[Item], request: TrialRequest, leave_after: int | None
) -> tuple[Answer, bool]:
    """Return the answer received, and whether it is complete; cancel after `leave_after` items."""
    collected, count = Collected.empty(request.params), 0
    async with aclosing(items) as stream:  # type: ignore[type-var]
        async for item in stream:
            collected.add(item)
            count += 1
            if leave_after is not None and count > leave_after:
                return collected.result(), False
    return collected.result(), True


@dataclass
class TrialClient:
    """Sends the requests of one trial. `expected` has the plain engine's answers by request number. Texts
    must be equal if `exact`, and with `greedy_only` only the texts of greedy requests. Log-probabilities must
    be equal if `exact_logprobs`, otherwise close."""

    llm: AsyncLLM
    http: httpx.AsyncClient
    expected: dict[int, Answer]
    settings: Any
    rng: Random
    exact: bool
    greedy_only: bool
    exact_logprobs: bool = True
    counts: dict[str, int] = field(default_factory=dict)

    async def ask(self, request: TrialRequest) -> None:
        """Send a request by a random route. Raises TrialFailure if the result is wrong."""
        chance, leave, priority = self.rng.random(), self.rng.randrange(6), self.rng.randint(-2, 2)
        plain = (
            not request.edits and request.params.grammar is None and request.params.prompt_logprobs is None
        )
        self._count("requests")
        try:
            if plain and chance < 0.25:
                await self._by_http(request, stream=False)
                return
            leave_after = leave if chance > 0.88 else None
            received, complete = await _read(_items(self.llm, request, priority), request, leave_after)
        except RequestError as error:
            self._refused(request, error.status, error.message, error.retry_after is not None)
            return
        self._count("streams" if request.edits else "library")
        if complete:
            self._compare(request, received)
        else:
            self._count("cancelled")

    async def _by_http(self, request: TrialRequest, stream: bool) -> None:
        body: dict[str, Any] = {name: getattr(request.params, name) for name in BODY_FIELDS}
        body |= {
            "model": request.adapter or self.llm.served_names[0],
            "prompt": request.prompt,
            "stop": list(request.params.stop),
        }
        body["logit_bias"] = {str(token): bias for token, bias in request.params.logit_bias.items()}
        reply = await self.http.post("/v1/completions", json=body)
        if reply.status_code != 200:
            again = "retry-after" in reply.headers
            self._refused(request, reply.status_code, reply.text, again)
            return
        self._count("http")
        left = self.llm.model.max_model_len - len(request.prompt)
        limited = (request.params.max_tokens or 0) > left
        if limited and f"limited: max_tokens to {left}" not in reply.headers.get("warning", ""):
            raise TrialFailure("no warning", f"request {request.number} by HTTP: limited to {left} tokens")
        for choice in reply.json()["choices"]:
            if self._exact(request):
                self._compare_choice(request.number, choice, left if limited else None)
        self._count("compared")

    def _compare_choice(self, number: int, choice: dict[str, Any], left: int | None) -> None:
        """Compare a choice with the plain engine's. The context may have limited it to the tokens `left`."""
        expected, index = self.expected[number], choice["index"]
        tokens, text, finish = expected.text[index]
        if left is not None and len(tokens) > left:
            self._count("limited")
            same = text.startswith(choice["text"]) and choice["finish_reason"] == "length"
        else:
            same = (choice["text"], choice["finish_reason"]) == (text, finish)
        if not same:
            raise TrialFailure(WRONG_TEXT, f"request {number} by HTTP: {choice} is not {text!r}")
        logprobs = [entry.logprob for entry in expected.logprobs[index][:left]]
        received = (choice.get("logprobs") or {"token_logprobs": []})["token_logprobs"]
        if self.exact_logprobs and received != logprobs:
            raise TrialFailure(WRONG_LOGPROBS, f"request {number} by HTTP: {received} is not {logprobs}")
        self._count("logprobs", len(logprobs))

    def _compare(self, request: TrialRequest, received: Answer) -> None:
        expected = self.expected[request.number]
        if not self._exact(request):
            return
        if request.params.prompt_logprobs is None:  # as prompt streams must be
            expected = replace(expected, prompt=[])
        self._count("compared")
        self._count("logprobs", received.count)
        if request.adapter:
            self._count("adapted")
        if kind := received.differs_from(expected, self.exact_logprobs):
            raise TrialFailure(kind, f"request {request.number}: {received} is not {expected}")

    def _exact(self, request: TrialRequest) -> bool:
        return self.exact and (request.params.greedy or not self.greedy_only)

    def _refused(self, request: TrialRequest, status: int, message: str, retry_after: bool) -> None:
        self._count("requests_refused")
        expected = self._expected(request, status)
        if status >= 500 and not (expected and retry_after):
            raise TrialFailure(UNEXPECTED_5XX, f"request {request.number}: {status} {message}")
        if not expected:
            raise TrialFailure("refused request", f"request {request.number}: {status} {message}")

    def _expected(self, request: TrialRequest, status: int) -> bool:
        """Return whether these settings may refuse the request with this error."""
        model, server = self.settings.model, self.settings.server
        length = len(request.prompt) + (request.params.max_tokens or 0)
        longest = max([len(request.prompt), *map(len, request.edits)])
        sequences = [model.max_num_seqs, server.prefill_max_num_seqs, server.decode_max_num_seqs]
        match status:
            case 400 | 404 if status == 400 or request.edits:  # the stream has ended, as its edit did not fit
                fits = max(length, longest) <= self.llm.model.max_model_len
                slots = request.params.n <= min(count for count in sequences if count)
                grammar = request.params.grammar
                return not fits or not slots or bool(grammar and len(grammar.text) > server.max_grammar_bytes)
            case 413:
                return server.max_body_bytes < 1 << 16
            case 429:
                return server.max_requests <= 60 or server.max_waiting_tokens < 20_000
            case 503:
                return model.slo_admission
        return False

    def _count(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number
