"""The measured durations of a request, in nanoseconds."""

from collections.abc import Awaitable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, TypeVar

from streamserve.text.output import Usage

T = TypeVar("T")


@dataclass
class RequestStopwatch:
    """Measures one request from its arrival. Times are of perf_counter_ns; 0: not yet."""

    arrived: int = field(default_factory=perf_counter_ns)
    load_began: int = 0
    loaded: int = 0
    submitted: int = 0
    first_token: int = 0

    async def loading(self, load: Awaitable[T]) -> T:
        """Wait for `load`, which loads the model or finds it loaded; return its result."""
        self.load_began = perf_counter_ns()
        result = await load
        self.loaded = perf_counter_ns()
        return result

    def submit(self) -> None:
        """Note that the prompt is submitted to the engine."""
        self.submitted = perf_counter_ns()

    def token(self) -> None:
        """Note a token. Only the first one counts."""
        self.first_token = self.first_token or perf_counter_ns()

    def without_text(self) -> dict[str, Any]:
        """Return the fields of a request that generates nothing."""
        return {
            "total_duration": perf_counter_ns() - self.arrived,
            "load_duration": self.loaded - self.load_began,
        }

    def generating(self, usage: Usage) -> dict[str, Any]:
        """Return the fields of a request whose last token has just come.

        The duration of the prompt ends with the first token, and excludes the time in the queue.
        """
        first = self.first_token or perf_counter_ns()
        queued = round(usage.queued_seconds * 1e9)
        return {
            **self.without_text(),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": max(0, first - self.submitted - queued),
            "eval_count": usage.completion_tokens,
            "eval_duration": perf_counter_ns() - first,
        }
