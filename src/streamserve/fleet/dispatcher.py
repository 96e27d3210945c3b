"""The assignment of open requests to workers: requests are placed, taken back, tried again and refused.

          ┌──────────── withdraw, retry ◀──────────┐
    open ─┴▶ waiting ── place ──▶ at its workers ──┴──▶ forget: over, or refused

A request's record and the load records of its workers change together, here alone.
"""

from collections.abc import Iterator
from itertools import count

from streamserve.fleet.availability import Availability
from streamserve.fleet.events import Command, Open, Refuse, Send
from streamserve.fleet.placement import Placement
from streamserve.fleet.quarantine import Quarantine
from streamserve.fleet.requests import OpenRequest
from streamserve.fleet.worker_state import Queued
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import Cancel


class Dispatcher:
    """The open `requests` by name. One that was lost `max_attempts` times is not tried again."""

    def __init__(
        self, availability: Availability, placement: Placement, quarantine: Quarantine, max_attempts: int
    ) -> None:
        self.requests: dict[str, OpenRequest] = {}
        self._availability = availability
        self._workers = availability.workers
        self._placement = placement
        self._quarantine = quarantine
        self._max_attempts = max_attempts
        self._attempts = count()

    def open(self, event: Open, now: float) -> Iterator[Command]:
        """Open a request and place it."""
        choices = range(event.params.n)
        request = OpenRequest(event, now, next(self._attempts))
        request.outputs = {choice: [] for choice in choices}
        request.resumed = {choice: [] for choice in choices}
        request.open_choices = set(choices)
        self.requests[event.request] = request
        yield from self.place(request, now)

    def place(self, request: OpenRequest, now: float) -> Iterator[Command]:
        """Route a request to the router's choice; without a free route candidate it stays waiting."""
        if not self._availability.can_serve:
            yield self.refuse(request, self.unavailable(self._availability.health()[1], now))
            return
        name, trial = request.name, self._quarantine.trial
        if self._quarantine.waits(name):
            return
        if trial and name in trial.group.members:
            chosen = self._placement.choose(request, now, only=trial.workers)
        else:
            chosen = self._placement.choose(request, now, without=self._quarantine.reserved(now))
        if chosen is None:
            return
        front, decode, tokens = chosen
        # Do not hand a request to a decode worker if it ends with its first token or is answered while its
        # prompt changes.
        params, early = request.opened.params, request.opened.answer_early
        local = decode is None or params.max_tokens in (0, 1) or early
        request.worker, request.decode = front, None if local else decode
        request.transferring = set() if local else set(request.open_choices)
        request.awaited_version = None
        ttft = params.slo.ttft_ms
        deadline = None if ttft is None else request.arrival + ttft / 1000
        self._workers[front].queue(name, Queued(tokens, deadline), now)
        self._workers[request.decode or front].incoming.add(name)
        yield Send(front, request.submit("both" if local else "prefill"))

    def place_waiting(self, now: float) -> Iterator[Command]:
        """Place all requests that have no worker."""
        for request in list(self.requests.values()):
            if request.worker is None:
                yield from self.place(request, now)

    def refuse_unservable(self, now: float) -> Iterator[Command]:
        """Refuse all requests if no worker can serve them any more."""
        if not self._availability.can_serve:
            for request in list(self.requests.values()):
                yield from self.place(request, now)

    def withdraw(self, request: OpenRequest, ended_worker: str = "") -> Iterator[Command]:
        """Remove a request from its workers and prepare a next attempt that continues after the delivered
        tokens."""
        yield from self.cancel(request, ended_worker)
        self._leave(request)
        request.next_attempt(next(self._attempts))

    def retry(self, request: OpenRequest, reason: str, now: float) -> Iterator[Command]:
        """Start another attempt that continues after the delivered tokens; refuse the request after
        `max_attempts` losses."""
        request.losses += 1
        yield from self.withdraw(request)
        if request.losses >= self._max_attempts:
            message = f"this request was lost {request.losses} times: {reason}"
            yield self.refuse(request, RequestError(message, status=500))
        else:
            yield from self.place(request, now)

    def cancel(self, request: OpenRequest, ended_worker: str = "") -> Iterator[Command]:
        """Cancel a request at all its workers except `ended_worker`."""
        for worker in sorted(request.workers - {ended_worker}):
            yield Send(worker, Cancel(request.name))

    def refuse(self, request: OpenRequest, error: RequestError) -> Command:
        """Forget a request, and return the refusal to its client."""
        self.forget(request)
        return Refuse(request.name, error)

    def forget(self, request: OpenRequest) -> None:
        """Remove a request that is over."""
        self._leave(request)
        del self.requests[request.name]
        self._quarantine.clear(request.name)

    def unavailable(self, why: str, now: float) -> RequestError:
        """Return the error for clients while requests cannot be served."""
        return RequestError(why, status=503, retry_after=self._availability.retry_after(now))

    def _leave(self, request: OpenRequest) -> None:
        for name in request.workers:
            self._workers[name].leave(request.name)
