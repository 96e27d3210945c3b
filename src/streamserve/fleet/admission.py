"""Whether there is room for one more request, and when to come again if there is none."""

from collections.abc import Collection

from streamserve.fleet.events import Open
from streamserve.fleet.rate import Rate
from streamserve.fleet.requests import OpenRequest
from streamserve.protocol.errors import RequestError

RETRY_AFTER = (1.0, 60.0)
"""The shortest and the longest time, in seconds, after which a refused client is told to come again."""


class Admission:
    """How many requests may be open at once, running and waiting. `max_waiting_tokens` bounds the prompts of
    those that wait; one request may always wait."""

    def __init__(self, max_requests: int, max_waiting_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._finished = Rate()
        self._begun_tokens = Rate()

    def begun(self, now: float, tokens: int) -> None:
        """A prompt of so many tokens waits no longer."""
        self._begun_tokens.add(now, tokens)

    def finished(self, now: float) -> None:
        """A request has ended."""
        self._finished.add(now)

    def refusal(self, event: Open, requests: Collection[OpenRequest], now: float) -> RequestError | None:
        """Why a request must come later, if it must, and when: once those that wait now have had their turn,
        at the rate at which requests end or prompts begin."""
        if len(requests) >= self._max_requests:
            waiting = sum(not request.admitted for request in requests)
            message = f"{len(requests)} requests are open, which is the limit (max_requests)"
            return _later(message, self._finished.seconds_for(now, waiting + 1))
        tokens = sum(len(r.opened.prompt) for r in requests if not r.admitted)
        if tokens and tokens + len(event.prompt) > self._max_waiting_tokens:
            message = (
                f"the prompt has {len(event.prompt)} tokens, and {tokens} tokens are waiting already; "
                f"the limit is {self._max_waiting_tokens} (max_waiting_tokens)"
            )
            return _later(message, self._begun_tokens.seconds_for(now, tokens))
        return None


def _later(message: str, seconds: float | None) -> RequestError:
    """A refusal of what may be served in `seconds`, if that is known."""
    low, high = RETRY_AFTER
    retry_after = low if seconds is None else min(max(seconds, low), high)
    return RequestError(message, status=429, retry_after=retry_after)
