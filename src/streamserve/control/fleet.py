"""The fleet without input or output: events in, commands out. Asyncio and ZeroMQ are a thin shell around it.

    door    Open, Edit, Close     ┌───────┐   Deliver, Refuse        → door
    workers FromWorker, Lost   →  │ Fleet │   Send                   → workers
    clock   Tick                  └───────┘   Start, Kill            → processes

It remembers of each request what its client has been given. When a worker dies, its requests go to another
(or to the same one, started anew) as a next attempt that carries those tokens, and goes on behind them.
Of an open prompt it keeps the latest version, so an edit that a client was told of is never lost.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from streamserve.control.events import (
    Close,
    Command,
    Deliver,
    Edit,
    FleetEvent,
    Heard,
    Kill,
    Lost,
    Open,
    Refuse,
    Send,
    Start,
    Tick,
)
from streamserve.control.rate import Rate
from streamserve.protocol import messages
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import (
    Admitted,
    Cancel,
    Event,
    Events,
    Failed,
    Finished,
    Guessed,
    Progress,
    PromptLogprobs,
    Ready,
    Report,
    Submit,
    Withdrawn,
)

KILL_AFTER = 4
"""A worker that has been silent this many times as long as counts as stuck is killed."""

RETRY_AFTER = (1.0, 60.0)
"""The shortest and the longest time, in seconds, after which a refused client is told to come again."""


@dataclass(frozen=True)
class FleetConfig:
    """`max_requests`: how many may be open at once, running and waiting. `max_waiting_tokens` bounds the
    prompts of those that wait; one request may always wait. A worker that says nothing for `stuck_after`
    seconds counts as stuck. After `max_restarts` losses in `restart_window` seconds it stays down; a request
    that was there for `max_attempts` losses is not tried again."""

    workers: tuple[str, ...] = ("unified-0",)
    max_requests: int = 1024
    max_waiting_tokens: int = 1 << 20
    stuck_after: float = 30.0
    max_restarts: int = 3
    restart_window: float = 300.0
    max_attempts: int = 3


class _GapError(Exception):
    """A worker skipped something: its client must not get the rest."""


@dataclass
class _Worker:
    incarnation: int = 1
    ready: Ready | None = None
    report: Report | None = None
    heard_at: float = 0.0
    stuck: bool = False
    losses: list[float] = field(default_factory=list)
    failure: Failed | None = None


@dataclass
class _Request:
    """What a client asked for and has been given so far. No two attempts of a fleet have the same number,
    so nothing a worker still says of an earlier request of the same name can be taken for this one's.

    `opened` holds the latest prompt. After an edit of a prompt that is answered early, the worker's tokens
    are of an older prompt until it says that it `awaits` no longer: that it has come to this version."""

    opened: Open
    arrival: float
    attempt: int
    worker: str | None = None
    losses: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)
    open_choices: set[int] = field(default_factory=set)
    admitted: bool = False
    prompt_logprobs: int = 0
    awaits: int | None = None


class Fleet:
    """All the workers and all the open requests of one server."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.workers = {name: _Worker() for name in config.workers}
        self.requests: dict[str, _Request] = {}
        self._attempts = count()
        self._finished = Rate()
        self._begun_tokens = Rate()

    def start(self, now: float) -> list[Command]:
        """The commands that bring up the workers."""
        for worker in self.workers.values():
            worker.heard_at = now
        return [Start(name, worker.incarnation) for name, worker in self.workers.items()]

    def handle(self, event: FleetEvent, now: float) -> list[Command]:
        """Take one event; returns what is to be done about it, in order."""
        match event:
            case Open():
                return list(self._open(event, now))
            case Edit():
                return list(self._edit(event, now))
            case Close():
                return list(self._close(event, now))
            case Heard():
                return list(self._heard(event, now))
            case Lost():
                return list(self._lost(event, now))
            case Tick():
                return list(self._tick(now))

    def health(self) -> tuple[bool, str]:
        """Whether requests are being served, and if not, why."""
        for name, worker in self.workers.items():
            if worker.failure:
                return False, f"worker {name} is down: {worker.failure.error}"
            if worker.ready is None:
                return False, f"worker {name} is loading its model"
            if worker.stuck:
                return False, f"worker {name} has said nothing for {self.config.stuck_after:g} seconds"
        return True, "ready"

    def edit_refusal(self, event: Edit) -> RequestError | None:
        """Why an edit cannot be taken; `handle` ignores it then, and nothing changes."""
        request = self.requests.get(event.request)
        if request is None:
            return RequestError(f"there is no request {event.request}", status=404)
        opened = request.opened
        if not opened.open:
            return RequestError(f"the prompt of {event.request} is finished", status=409)
        if event.version <= opened.version:
            message = f"version {event.version} is not newer than {opened.version}, the current one"
            return RequestError(message, status=409)
        if not 0 <= event.keep <= len(opened.prompt):
            message = f"keep is {event.keep}, but the prompt has {len(opened.prompt)} tokens"
            return RequestError(message, status=400)
        if not 0 <= event.tail <= event.keep + len(event.tokens):
            return RequestError(f"tail is {event.tail}, more than the prompt's tokens", status=400)
        if event.params is not None and event.params.n != opened.params.n:
            return RequestError("the number of choices (n) cannot change", status=400)
        return None

    def _open(self, event: Open, now: float) -> Iterator[Command]:
        if event.request in self.requests:
            yield Refuse(event.request, RequestError(f"request id {event.request} is in use", status=409))
            return
        full = self._full(event, now)
        if full:
            yield Refuse(event.request, full)
            return
        choices = range(event.params.n)
        request = _Request(event, now, next(self._attempts))
        request.outputs = {choice: [] for choice in choices}
        request.open_choices = set(choices)
        self.requests[event.request] = request
        yield from self._place(request)

    def _edit(self, event: Edit, now: float) -> Iterator[Command]:
        """The latest prompt is kept for a next attempt. An answer to an earlier one is withdrawn at once."""
        if self.edit_refusal(event):
            return
        request = self.requests[event.request]
        before = request.opened
        prompt = before.prompt[: event.keep] + event.tokens
        request.opened = after = replace(
            before,
            prompt=prompt,
            params=event.params or before.params,
            open=not event.finish,
            tail=event.tail,
            version=event.version,
        )
        if request.worker is not None:
            message = messages.Edit(
                event.request, request.attempt, event.version, event.keep, event.tokens, event.finish,
                event.params, event.tail, now,
            )  # fmt: skip
            yield Send(request.worker, message)
        if before.answer_early and (after.prompt, after.params) != (before.prompt, before.params):
            request.awaits = event.version if request.worker is not None else None
            if any(request.outputs.values()):
                request.outputs = {choice: [] for choice in request.outputs}
                request.began.clear()
                withdrawn = Withdrawn(event.request, request.attempt, event.version)
                yield Deliver(event.request, [withdrawn], last=False)

    def _full(self, event: Open, now: float) -> RequestError | None:
        """Why a request must come later, if it must, and when: once those that wait now have had their turn,
        at the rate at which requests end or prompts begin."""
        limit = self.config.max_requests
        if len(self.requests) >= limit:
            waiting = sum(not request.admitted for request in self.requests.values())
            message = f"{len(self.requests)} requests are open, which is the limit (max_requests)"
            return _later(message, self._finished.seconds_for(now, waiting + 1))
        limit = self.config.max_waiting_tokens
        tokens = sum(len(r.opened.prompt) for r in self.requests.values() if not r.admitted)
        if tokens and tokens + len(event.prompt) > limit:
            message = (
                f"the prompt has {len(event.prompt)} tokens, and {tokens} tokens are waiting already; "
                f"the limit is {limit} (max_waiting_tokens)"
            )
            return _later(message, self._begun_tokens.seconds_for(now, tokens))
        return None

    def _place(self, request: _Request) -> Iterator[Command]:
        """Give a request to the ready worker with the fewest; with none ready it waits for one."""
        if all(worker.failure for worker in self.workers.values()):
            yield self._refuse(request, RequestError(self.health()[1], status=503))
            return
        ready = [name for name, worker in self.workers.items() if worker.ready]
        if not ready:
            return
        request.worker = min(ready, key=self._load)
        opened = request.opened
        outputs = {choice: list(request.outputs[choice]) for choice in sorted(request.open_choices)}
        message = Submit(
            opened.request,
            request.attempt,
            opened.prompt,
            opened.params,
            outputs,
            request.arrival,
            opened.priority,
            opened.cache_salt,
            {choice: request.began[choice] for choice in outputs if choice in request.began},
            opened.open,
            opened.answer_early,
            opened.tail,
            opened.version,
        )
        request.awaits = None
        yield Send(request.worker, message)

    def _load(self, worker: str) -> int:
        return sum(request.worker == worker for request in self.requests.values())

    def _close(self, event: Close, now: float) -> Iterator[Command]:
        request = self.requests.get(event.request)
        if request is None:
            return
        if event.choice is None:
            request.open_choices.clear()
        else:
            request.open_choices.discard(event.choice)
        if request.worker is not None:
            yield Send(request.worker, Cancel(event.request, event.choice))
        if not request.open_choices:
            self._finished.add(now)
            del self.requests[event.request]

    def _heard(self, event: Heard, now: float) -> Iterator[Command]:
        worker = self.workers[event.worker]
        if event.incarnation != worker.incarnation or worker.failure:
            return
        worker.heard_at, worker.stuck = now, False
        match event.message:
            case Ready():
                worker.ready = event.message
                for request in list(self.requests.values()):
                    if request.worker is None:
                        yield from self._place(request)
            case Failed():
                worker.failure = event.message
                yield from self._fail_all()
            case Report():
                worker.report = event.message
            case Events():
                yield from self._deliver(event.message.events, now)

    def _deliver(self, events: list[Event], now: float) -> Iterator[Command]:
        """Pass on what is new of each request, in one piece each."""
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request, []).append(event)
        for name, news in by_request.items():
            request = self.requests.get(name)
            if request is None:
                continue
            try:
                fresh = [taken for event in news if (taken := self._accept(request, event, now)) is not None]
            except _GapError as gap:
                if request.worker is not None:
                    yield Send(request.worker, Cancel(name))
                yield self._refuse(request, RequestError(str(gap), status=500))
                continue
            last = not request.open_choices
            if last:
                self._finished.add(now)
                del self.requests[name]
            if fresh or last:
                yield Deliver(name, fresh, last)

    def _accept(self, request: _Request, event: Event, now: float) -> Event | None:
        """Exactly the next index of the current attempt is taken; repeats are dropped, a gap is an error."""
        if event.attempt != request.attempt:
            return None
        if isinstance(event, PromptLogprobs):
            return self._accept_prompt_logprobs(request, event)
        if isinstance(event, Progress):
            return event if event.version == request.opened.version else None
        if isinstance(event, Withdrawn):  # its client knows already
            if request.awaits is not None and event.version >= request.awaits:
                request.awaits = None
            return None
        if event.choice not in request.open_choices:
            return None
        if isinstance(event, Admitted):
            if request.admitted:
                return None
            request.admitted = True
            self._begun_tokens.add(now, len(request.opened.prompt))
            return event
        if isinstance(event, Guessed):
            return event
        if isinstance(event, Finished):
            request.open_choices.discard(event.choice)
            return event
        if request.awaits is not None:
            return None
        given = request.outputs[event.choice]
        if event.index > len(given):
            raise _GapError(f"token {event.index} of choice {event.choice} came after {len(given)} tokens")
        if event.index < len(given):
            return None
        if not given:
            request.began[event.choice] = now
        given.append(event.token)
        if event.finish:
            request.open_choices.discard(event.choice)
        return event

    def _accept_prompt_logprobs(self, request: _Request, event: PromptLogprobs) -> PromptLogprobs | None:
        """A next attempt computes the prompt anew, perhaps in other chunks: only what is new is passed on."""
        seen, first = request.prompt_logprobs, event.start - 1
        if first > seen:
            raise _GapError(f"prompt position {event.start} came after {seen} positions")
        if first + len(event.entries) <= seen:
            return None
        request.prompt_logprobs = first + len(event.entries)
        return PromptLogprobs(event.request, event.attempt, seen + 1, event.entries[seen - first :])

    def _lost(self, event: Lost, now: float) -> Iterator[Command]:
        worker = self.workers[event.worker]
        if event.incarnation != worker.incarnation or worker.failure:
            return
        never_ready = worker.incarnation == 1 and worker.ready is None
        worker.ready = worker.report = None
        worker.losses = [t for t in worker.losses if now - t < self.config.restart_window] + [now]
        if never_ready or len(worker.losses) > self.config.max_restarts:
            worker.failure = Failed(event.reason, 1)
        else:
            worker.incarnation += 1
            worker.heard_at = now
            yield Start(event.worker, worker.incarnation)
        for request in list(self.requests.values()):
            if request.worker == event.worker:
                yield from self._retry(request, event.reason)
        yield from self._fail_all()

    def _retry(self, request: _Request, reason: str) -> Iterator[Command]:
        request.worker = None
        request.losses += 1
        request.attempt = next(self._attempts)
        if request.losses >= self.config.max_attempts:
            message = f"the worker died {request.losses} times while serving this request: {reason}"
            yield self._refuse(request, RequestError(message, status=500))
        else:
            yield from self._place(request)

    def _fail_all(self) -> Iterator[Command]:
        """With no worker left, nobody waits in vain."""
        if all(worker.failure for worker in self.workers.values()):
            for request in list(self.requests.values()):
                yield from self._place(request)

    def _refuse(self, request: _Request, error: RequestError) -> Command:
        del self.requests[request.opened.request]
        return Refuse(request.opened.request, error)

    def _tick(self, now: float) -> Iterator[Command]:
        for name, worker in self.workers.items():
            silence = now - worker.heard_at
            worker.stuck = worker.ready is not None and silence > self.config.stuck_after
            if worker.stuck and silence > KILL_AFTER * self.config.stuck_after:
                worker.heard_at = now
                yield Kill(name)


def _later(message: str, seconds: float | None) -> RequestError:
    """A refusal of what may be served in `seconds`, if that is known."""
    low, high = RETRY_AFTER
    retry_after = low if seconds is None else min(max(seconds, low), high)
    return RequestError(message, status=429, retry_after=retry_after)
