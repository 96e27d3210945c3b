"""The prompts that a worker has to compute, with sums over them for routers. The sums are updated with each
change, as a worker may have a hundred prompts and is a candidate for every request."""

from dataclasses import dataclass
from math import inf

from streamserve.scheduling.routing import STEP_TOKENS


@dataclass(frozen=True, slots=True)
class Queued:
    """A queued prompt: `tokens` still to compute, and the `deadline` of its first token."""

    tokens: int
    deadline: float | None = None


class PromptQueue:
    """The prompts of a worker by request: complete prompts, and prompt streams that are not idle. `tokens` is
    the sum of the tokens that remain to compute."""

    __slots__ = ("_arriving", "_complete", "_long", "_timed", "_untimed_tokens", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._complete: dict[str, Queued] = {}
        self._arriving: dict[str, int] = {}
        self._long: dict[str, int] = {}
        """Tokens of the prompts with more than STEP_TOKENS tokens to compute."""
        self._timed: dict[str, Queued] = {}
        """Complete prompts with a deadline."""
        self._untimed_tokens = 0
        """Tokens of the complete prompts without a deadline."""

    def __len__(self) -> int:
        return len(self._complete) + len(self._arriving)

    @property
    def computing(self) -> bool:
        """Whether there is a complete prompt."""
        return bool(self._complete)

    @property
    def long_prompts(self) -> tuple[int, ...]:
        """Tokens of each prompt that has more than STEP_TOKENS to compute."""
        return tuple(self._long.values())

    def put(self, request: str, queued: Queued) -> None:
        """Add or change a complete prompt."""
        self.remove(request)
        self._complete[request] = queued
        if queued.deadline is None:
            self._untimed_tokens += queued.tokens
        else:
            self._timed[request] = queued
        self._count(request, queued.tokens)

    def arrives(self, request: str, tokens: int) -> None:
        """Set the tokens that remain to compute of a prompt stream. A prompt stream with none counts as
        idle."""
        self.remove(request)
        if tokens:
            self._arriving[request] = tokens
            self._count(request, tokens)

    def remove(self, request: str) -> bool:
        """Remove a prompt, if it is there; return whether it was complete."""
        queued = self._complete.pop(request, None)
        if queued is None:
            self.tokens -= self._arriving.pop(request, 0)
        else:
            self.tokens -= queued.tokens
            if self._timed.pop(request, None) is None:
                self._untimed_tokens -= queued.tokens
        self._long.pop(request, None)
        return queued is not None

    def timely(self, now: float) -> tuple[int, float]:
        """Return the tokens of the complete prompts whose first tokens can still be in time, and the latest
        of their deadlines: inf if one has no deadline, `now` if there are no such prompts."""
        tokens = self._untimed_tokens
        until = inf if len(self._complete) > len(self._timed) else now
        for queued in self._timed.values():
            if queued.deadline is not None and queued.deadline >= now:
                tokens += queued.tokens
                until = max(until, queued.deadline)
        return tokens, until

    def _count(self, request: str, tokens: int) -> None:
        self.tokens += tokens
        if tokens > STEP_TOKENS:
            self._long[request] = tokens
