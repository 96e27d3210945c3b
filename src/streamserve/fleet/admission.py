"""Admission control: whether one more request may be accepted, and if it is refused, when to retry."""

from streamserve.fleet.events import Open
from streamserve.fleet.rate import Rate
from streamserve.protocol.errors import RequestError
from streamserve.scheduling.feasibility import RETRY


class WaitingPrompts:
    """The prompts of open requests that no worker has scheduled yet: their sizes, and the sum of the sizes.
    The sum is kept up to date, as each arrival needs it."""

    def __init__(self) -> None:
        self.tokens = 0
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, request: str, tokens: int) -> None:
        """Record the size of a prompt; replace an earlier size."""
        self.discard(request)
        self._sizes[request] = tokens
        self.tokens += tokens

    def discard(self, request: str) -> None:
        """Forget a prompt, if it is known."""
        self.tokens -= self._sizes.pop(request, 0)


class Admission:
    """Limits the open requests, running and waiting, to `max_requests`, and the prompt tokens of waiting
    requests to `max_waiting_tokens`. One request may always wait."""

    def __init__(self, max_requests: int, max_waiting_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._finished = Rate()
        self._started_tokens = Rate()

    def started(self, now: float, tokens: int) -> None:
        """Record that a prompt of `tokens` tokens has been scheduled."""
        self._started_tokens.add(now, tokens)

    def finished(self, now: float) -> None:
        """Record that a request has ended."""
        self._finished.add(now)

    def refusal(self, event: Open, requests: int, waiting: WaitingPrompts, now: float) -> RequestError | None:
        """Return the refusal of a request, or None. `requests` is the number of open requests, `waiting`
        their waiting prompts. The refusal's Retry-After is the predicted time until the waiting requests are
        served, by the recent rate at which requests end or prompts begin."""
        if requests >= self._max_requests:
            message = f"{requests} requests are open, which is the limit (max_requests)"
            return _retry_later(message, self._finished.seconds_for(now, len(waiting) + 1))
        tokens = waiting.tokens
        if tokens and tokens + len(event.prompt) > self._max_waiting_tokens:
            message = (
                f"the prompt has {len(event.prompt)} tokens, and {tokens} tokens are waiting already; "
                f"the limit is {self._max_waiting_tokens} (max_waiting_tokens)"
            )
            return _retry_later(message, self._started_tokens.seconds_for(now, tokens))
        return None


def _retry_later(message: str, seconds: float | None) -> RequestError:
    """Return a refusal with a Retry-After of `seconds`, limited to RETRY; None stands for unknown."""
    low, high = RETRY
    retry_after = low if seconds is None else min(max(seconds, low), high)
    return RequestError(message, status=429, retry_after=retry_after)
