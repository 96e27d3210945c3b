"""Bounds on what one request, or all of them together, may take. Every refusal names field and limit."""

from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamserve.protocol.errors import RequestError
from streamserve.protocol.sampling import SamplingParams

MAX_DEPTH = 64
"""How deep a request's JSON may nest."""

MAX_CHOICES = 1024
"""Choices of all prompts of one request."""

MAX_SCORES = 2 << 20
"""Log-probabilities that one whole reply may hold: some 300 MB while they are gathered."""

BODIES = 8
"""So many bodies of the largest size may be held at once, over all requests."""


def check_depth(content: Any) -> None:
    """Raises RequestError if `content`, parsed JSON, nests deeper than MAX_DEPTH."""
    level, depth = [content], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RequestError(f"the request is nested too deeply: at most {MAX_DEPTH} levels are taken")
        level = [
            part
            for whole in level
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, (dict, list))
        ]


def check_choices(params: Sequence[SamplingParams]) -> None:
    """Raises RequestError if a request, whose prompts have these `params`, asks for too many choices."""
    choices = sum(each.n for each in params)
    if choices > MAX_CHOICES:
        raise RequestError(
            f"n is {params[0].n} for {len(params)} prompts: at most {MAX_CHOICES} choices are taken in all",
            field="n",
        )


def check_scores(params: Sequence[SamplingParams], context: int) -> None:
    """Raises RequestError if a whole reply would hold too many log-probabilities. An output has at most as
    many tokens as the `context`."""
    scores = sum(
        each.n * min(each.max_tokens or context, context) * (each.logprobs + 1)
        for each in params
        if each.logprobs is not None
    )
    if scores > MAX_SCORES:
        raise RequestError(
            f"logprobs would fill the reply with up to {scores} values, and {MAX_SCORES} is the limit: ask "
            "for a stream, or for fewer tokens, choices or alternatives",
            field="logprobs",
        )


class BodyBudget:
    """Refuses, with 429, bodies that together with those of the other open requests are more than `limit`
    bytes: uploads must not take all memory. Sits inside what turns a RequestError into a reply."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = 0

        async def receive_counted() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            held += size
            self._held += size
            if self._held > self._limit:
                text = f"the bodies of all open requests hold more than {self._limit} bytes, the limit"
                raise RequestError(text, status=429, retry_after=1.0)
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._held -= held
