"""The assignment of open requests to workers: requests are placed, taken back, tried again and refused.

          ┌──────────── withdraw, retry ◀──────────┐
    open ─┴▶ waiting ── place ──▶ at its workers ──┴──▶ forget: over, or refused

A request's record and the load records of its workers change together, here alone.
"""

from functools import lru_cache
from itertools import count

from streamserve.fleet.adapters import AdapterBook
from streamserve.fleet.admission import WaitingPrompts
from streamserve.fleet.availability import Availability
from streamserve.fleet.events import Command, Deliver, Open, Refuse, Send
from streamserve.fleet.kept_outputs import NOTHING, Kept
from streamserve.fleet.placement import Placement, WorkerRoute
from streamserve.fleet.prompt_queue import Queued
from streamserve.fleet.quarantine import Quarantine
from streamserve.fleet.request_status import RequestStatus
from streamserve.fleet.requests import OpenRequest, no_outputs
from streamserve.protocol import messages
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import Cancel

BUSY = 0.8
"""Share of the strictest latency target that the predicted time per output token may reach. Above it, first
tokens wait for the decision of the decode worker, which takes one more step."""


@lru_cache(maxsize=64)
def _choices(number: int) -> frozenset[int]:
    """Return the choices 0 … number - 1 of a request: one shared object for all requests with this number."""
    return frozenset(range(number))


class Dispatcher:
    """The open `requests` by name. A request that was lost `max_attempts` times is not tried again. Messages
    to workers and clients are appended to `commands`."""

    def __init__(
        self,
        availability: Availability,
        placement: Placement,
        quarantine: Quarantine,
        adapters: AdapterBook,
        max_attempts: int,
        slo_admission: bool,
        commands: list[Command],
    ) -> None:
        self.requests: dict[str, OpenRequest] = {}
        self.waiting = WaitingPrompts()
        self._availability = availability
        self._workers = availability.workers
        self._placement = placement
        self._quarantine = quarantine
        self._adapters = adapters
        self._max_attempts = max_attempts
        self._slo_admission = slo_admission
        self._commands = commands
        self._attempts = count()
        self.rerouted = 0
        """Prompt streams that were moved to another route."""

    def open(self, event: Open, now: float, kept: Kept = NOTHING) -> None:
        """Open a request and place it. Its first tokens are the outputs that another head's workers have
        `kept`; if these are complete, no worker is needed."""
        request = OpenRequest(event, now, next(self._attempts))
        request.open_choices = _choices(event.params.n)
        request.outputs = no_outputs(event.params.n)
        self.requests[event.request] = request
        self.waiting.add(request.name, len(event.prompt))
        if kept:
            tokens: list[messages.Event] = [*request.begin_with(kept, now)]
            self._commands.append(Deliver(request.name, tokens, last=not request.open_choices))
        if request.open_choices:
            self.place(request, now)
        else:
            self.forget(request)

    @property
    def some_wait(self) -> bool:
        """Whether a request waits for a worker."""
        return any(
            request.status is RequestStatus.WAITING and request.placeable
            for request in self.requests.values()
        )

    def place(self, request: OpenRequest, now: float) -> None:
        """Send a request to the worker that the router chooses. The request stays waiting if no route
        candidate is free, or if it is a prompt stream without content."""
        if not self._availability.can_serve:
            self.refuse(request, self.unavailable(self._availability.health()[1], now))
            return
        route = None if self._quarantine.waits(request.name) else self._route(request, now)
        if route is not None:
            self._assign(request, route, now)

    def reroute(self, request: OpenRequest, now: float, new_attempt: bool = False) -> bool:
        """Move a prompt stream to a better route, as a new attempt; return whether one began. Without
        `new_attempt`, it stays unless the move is worth its cost or the decode worker is gone."""
        decode = request.decode
        ended = decode if decode and not self._workers[decode].ready else ""
        new_attempt = new_attempt or bool(ended)
        route = self._route(request, now, stay=(request.worker or "", decode))
        stays = route is None or (route.worker, route.decode) == (request.worker, decode)
        if stays and not new_attempt:
            return False
        self.rerouted += not stays
        self.withdraw(request, ended)
        if route is not None:
            self._assign(request, route, now)
        return True

    def update_load(self, request: OpenRequest, now: float) -> None:
        """Record at a request's workers how much of it is left to compute.

        An idle prompt stream is no load; its deadline counts from the end of its prompt.
        """
        front, opened = request.worker, request.opened
        if front is None or any(request.outputs.values()):
            return
        if opened.open:
            self._workers[front].arrives(request.name, request.uncomputed)
        else:
            ttft = opened.params.slo.ttft_ms
            deadline = None if ttft is None else request.since + ttft / 1000
            self._workers[front].queue(request.name, Queued(request.uncomputed, deadline), now)
        if not opened.open or opened.answer_early:
            self._workers[request.decode or front].expects(request.name)

    def holds(self, request: OpenRequest) -> bool:
        """Return whether the first token of a complete prompt waits for the reservation. Its decode worker
        may refuse the request, or defer it for the sake of latency targets: these count from the first token
        on."""
        if request.decode is None or request.opened.open or any(request.outputs.values()):
            return False
        decode = self._workers[request.decode]
        own = request.opened.params.slo.tpot_ms
        if decode.deferring or (self._slo_admission and own is not None):
            return True
        others = [self.requests[name] for name in (decode.incoming | decode.decoding) - {request.name}]
        targets = [other.opened.params.slo.tpot_ms for other in others] + [own]
        strictest = min((target for target in targets if target is not None), default=None)
        if strictest is None or not others:
            return False
        step = decode.decode_seconds(len(others) + 1)
        # Without step costs nothing can be predicted: wait for the decode worker.
        return step is None or step > BUSY * strictest / 1000

    def _route(
        self, request: OpenRequest, now: float, stay: tuple[str, str | None] | None = None
    ) -> WorkerRoute | None:
        """Return the router's choice, or None if no route is possible now. A prompt stream is routed once its
        first content has arrived."""
        trial = self._quarantine.trial
        if trial and request.name in trial.group.members:
            return self._placement.choose(request, now, only=trial.workers)
        if not request.placeable:
            return None
        without = self._quarantine.reserved(now) | self._lacking(request.opened.adapter)
        return self._placement.choose(request, now, without=without, stay=stay)

    def _lacking(self, adapter: str) -> frozenset[str]:
        """Return the workers to avoid because they do not have an adapter, if others can serve without
        them."""
        availability = self._availability
        taking = {name for name in availability.workers if availability.takes_new(name)} if adapter else set()
        for lacking in self._adapters.lacking(adapter):
            if availability.placing.complete(taking - lacking):
                return lacking
        return frozenset()

    def _assign(self, request: OpenRequest, route: WorkerRoute, now: float) -> None:
        """Send a request to its worker. If the first token waits for the decision of the decode worker, send
        the request there too. A request that ends with its first token is decoded by its first worker."""
        params = request.opened.params
        final = not request.opened.open or request.opened.answer_early
        local = route.decode is None or (final and params.max_tokens in (0, 1))
        request.assign(route.worker, None if local else route.decode)
        hold = self.holds(request)
        request.arriving.computed = len(request.opened.prompt) - route.tokens
        if any(request.outputs.values()):
            self._workers[route.worker].queue(request.name, Queued(route.tokens), now)
            self._workers[request.decode or route.worker].expects(request.name)
        else:
            self.update_load(request, now)
        self._commands.append(Send(route.worker, request.submit("both" if local else "prefill", hold)))
        if hold and request.decode:
            request.become(RequestStatus.RESERVING)
            self._commands.append(Send(request.decode, request.submit("decode")))

    def place_waiting(self, now: float) -> None:
        """Place all requests that have no worker."""
        for request in list(self.requests.values()):
            if request.status is RequestStatus.WAITING:
                self.place(request, now)

    def refuse_unservable(self, now: float) -> None:
        """Refuse all requests if no worker can serve them any more."""
        if not self._availability.can_serve:
            for request in list(self.requests.values()):
                self.place(request, now)

    def end_answers(self, reason: str) -> None:
        """End the requests for which tokens were delivered, because no worker can continue them."""
        for request in list(self.requests.values()):
            if any(request.outputs.values()):
                self.cancel(request)
                self.refuse(request, RequestError(reason, status=503))

    def withdraw(self, request: OpenRequest, ended_worker: str = "") -> None:
        """Remove a request from its workers and prepare its next attempt, which continues after the delivered
        tokens."""
        self.cancel(request, ended_worker)
        self._leave(request)
        request.next_attempt(next(self._attempts))

    def retry(self, request: OpenRequest, reason: str, now: float) -> None:
        """Start another attempt that continues after the delivered tokens; refuse the request after
        `max_attempts` losses."""
        request.losses += 1
        self.withdraw(request)
        if request.losses >= self._max_attempts:
            message = f"this request was lost {request.losses} times: {reason}"
            self.refuse(request, RequestError(message, status=500))
        else:
            self.place(request, now)

    def cancel(self, request: OpenRequest, ended_worker: str = "") -> None:
        """Cancel a request at all its workers except `ended_worker`."""
        for worker in sorted(request.workers - {ended_worker}):
            self._commands.append(Send(worker, Cancel(request.name)))

    def refuse(self, request: OpenRequest, error: RequestError) -> None:
        """Forget a request and refuse it to its client."""
        self.forget(request)
        self._commands.append(Refuse(request.name, error))

    def forget(self, request: OpenRequest) -> None:
        """Remove a request that is over from all records."""
        self._leave(request)
        del self.requests[request.name]
        self.waiting.discard(request.name)
        self._quarantine.clear(request.name)

    def unavailable(self, why: str, now: float) -> RequestError:
        """Return the error for clients while requests cannot be served."""
        return RequestError(why, status=503, retry_after=self._availability.retry_after(now))

    def _leave(self, request: OpenRequest) -> None:
        for name in request.workers:
            self._workers[name].leave(request.name)
