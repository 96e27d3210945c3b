"""The fleet's record of an open request: what was delivered to its client and what may still come.

Only the next index of the current attempt is accepted. Repeats are dropped; a gap is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

import msgspec

from streamserve.fleet.events import ClientEdit, Open
from streamserve.fleet.kept_outputs import Kept
from streamserve.fleet.request_status import TRANSITIONS, RequestStatus, RequestStatusError
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import (
    Admitted,
    DraftVerified,
    Event,
    Finished,
    OutputWithdrawn,
    Phase,
    Pooled,
    Progress,
    PromptLogprobs,
    RequestKind,
    Submit,
    Token,
)
from streamserve.protocol.sampling import MAX_CHOICES, SamplingParams, SpeculationLimits

UNSPECULATED = SpeculationLimits(enabled=False)
NO_CHOICES: frozenset[int] = frozenset()
Outputs = Mapping[int, list[int]]
"""The output tokens of a request, by choice."""


@lru_cache(maxsize=MAX_CHOICES)
def no_outputs(choices: int) -> Outputs:
    """Return the outputs of a request before its first token: one shared object for all requests with this
    number of choices."""
    return MappingProxyType({choice: [] for choice in range(choices)})


NO_OUTPUTS = no_outputs(0)


class GapError(Exception):
    """A worker skipped a token: later tokens must not be delivered to the client."""


@dataclass(slots=True)
class Arriving:
    """The state of a prompt that still arrives; all counts are tokens from its start.

    - `computed`: tokens computed by its worker; `pushed`: tokens in its decode worker's cache.
    - `push`: name of the cache copy in progress; `push_end`: what will be `pushed` once it has landed.
    - `push_failed`: no more pushes until the next edit.
    """

    computed: int = 0
    pushed: int = 0
    push: str | None = None
    push_end: int = 0
    push_failed: bool = False

    def retain(self, retained: int) -> None:
        """Apply an edit that retains the first `retained` tokens."""
        self.computed = min(self.computed, retained)
        self.pushed = min(self.pushed, retained)
        self.push_end = min(self.push_end, retained)
        self.push_failed = False


@dataclass(slots=True)
class Suspicion:
    """What the quarantine (quarantine.py) has counted against a request, and for it.

    - `strikes`: lost steps that the request was in. `tries`: trials in which it ended its worker alone.
    - `killed`: lost steps that ended by a SIGKILL of unclear cause. `killed_alone`: the ones
      in which its worker had no other request.
    - `unexplained`: deaths of its worker outside any step, since its last strike.
    - `cleared`: trials that it survived.
    """

    strikes: int = 0
    tries: int = 0
    killed: int = 0
    killed_alone: int = 0
    unexplained: int = 0
    cleared: int = 0


@dataclass(frozen=True)
class Edited:
    """The effect of an edit: whether the prompt or its parameters `changed`, and the number of delivered
    tokens that it made void (`withdrawn`)."""

    changed: bool
    withdrawn: int


@dataclass(slots=True)
class OpenRequest:
    """A client's request and the output delivered so far. Attempt numbers are unique in a fleet: so a late
    message for an earlier request of the same name is not taken for this request's.

    `worker` computes the prompt and, except in a stream pair, the output tokens. In a pair, `decode` computes
    the tokens of all choices except those in `transferring`, whose KV has not arrived yet.
    fleet/request_status.py describes its `status`.

    `resumed` has the outputs with which the current attempt began; choices without any are left out.
    `first_token_at` has the time of each choice's first token. Requests share their `outputs` until their
    first tokens.

    `losses` counts the attempts that were lost with a worker. `suspicion` has the counts of the quarantine.
    The request is `isolated` from the first time on that it was a suspect.

    `opened` holds the latest prompt. `since` is when the client began to wait for the first token: when the
    request arrived, or when its prompt stream was finished. `arriving` says how far a prompt stream is
    computed. After an edit of a prompt that is answered early, the worker's tokens belong to an older version
    until the worker confirms version `awaited_version`, which is then cleared. `kind`: what the request is
    for; cache copies are requests without a client.
    """

    opened: Open
    since: float
    attempt: int
    worker: str | None = None
    decode: str | None = None
    status: RequestStatus = RequestStatus.WAITING
    transferring: frozenset[int] = NO_CHOICES
    resumed: Outputs = field(default_factory=lambda: NO_OUTPUTS)
    losses: int = 0
    suspicion: Suspicion = field(default_factory=Suspicion)
    isolated: bool = False
    outputs: Outputs = field(default_factory=lambda: NO_OUTPUTS)
    first_token_at: dict[int, float] = field(default_factory=dict)
    open_choices: frozenset[int] = NO_CHOICES
    admitted: bool = False
    awaited_version: int | None = None
    prompt_logprobs: int = 0
    arriving: Arriving = field(default_factory=Arriving)
    kind: RequestKind = RequestKind.CLIENT

    @property
    def name(self) -> str:
        """The request's id, under which workers and clients know the request."""
        return self.opened.request

    @property
    def cache_salt(self) -> str:
        """The cache namespace that separates this request's KV from other requests' KV. An isolated request
        has a unique namespace."""
        salt = self.opened.cache_salt
        return f"{salt}\0isolated\0{self.name}" if self.isolated else salt

    @property
    def decoded(self) -> bool:
        """Whether this attempt has produced, for each open choice, a token after its first token."""
        return all(
            len(self.outputs[choice]) - len(self.resumed.get(choice, ())) > 1 for choice in self.open_choices
        )

    def limited(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters for the next attempt. An isolated request runs without speculation, which
        never changes the text."""
        return msgspec.structs.replace(params, speculation=UNSPECULATED) if self.isolated else params

    @property
    def uncomputed(self) -> int:
        """Number of prompt tokens to compute now. The tail of an open prompt stream is left out, unless it is
        answered early."""
        opened = self.opened
        length = len(opened.prompt)
        if not opened.open:
            return max(length - self.arriving.computed, 1)
        last = 0 if opened.answer_early else max(opened.tail, 1)
        return max(length - last - self.arriving.computed, 0)

    @property
    def placeable(self) -> bool:
        """Whether enough of the prompt is known to route the request. A prompt stream needs content besides
        the tail that every prompt may have."""
        return not self.opened.open or len(self.opened.prompt) > self.opened.tail

    @property
    def workers(self) -> set[str]:
        """The workers that may hold state for this request."""
        return {name for name in (self.worker, self.decode) if name}

    def depends_on(self, worker: str) -> bool:
        """Return whether the request cannot continue without `worker`. A prompt stream that still arrives
        needs its decode worker only later."""
        if self.decode is None or (self.opened.open and not self.opened.answer_early):
            return self.worker == worker
        return self.decode == worker or (self.worker == worker and bool(self.transferring))

    def become(self, status: RequestStatus) -> None:
        """Change the status. Raises RequestStatusError if the change is illegal (TRANSITIONS)."""
        if status not in TRANSITIONS[self.status]:
            raise RequestStatusError(
                f"request {self.name} cannot become {status.label}: it is {self.status.label}"
            )
        self.status = status

    def assign(self, worker: str, decode: str | None) -> None:
        """Record the workers of this attempt. Without `decode`, the worker also computes the output."""
        self.become(RequestStatus.QUEUED)
        self.worker, self.decode = worker, decode
        self.transferring = self.open_choices if decode else NO_CHOICES

    def begin_with(self, kept: Kept, now: float) -> list[Token]:
        """Take the first tokens of some choices from outputs that another head's workers have kept; return
        them as events."""
        self.resumed = {choice: [token.token for token in tokens] for choice, tokens in kept.items()}
        self.outputs = {**self.outputs, **{choice: list(tokens) for choice, tokens in self.resumed.items()}}
        self.first_token_at = dict.fromkeys(kept, now)
        self.open_choices -= {choice for choice, tokens in kept.items() if tokens[-1].finish}
        return [
            Token(self.name, self.attempt, choice, index, token.token, token.logprob, token.top, token.finish)
            for choice, tokens in sorted(kept.items())
            for index, token in enumerate(tokens)
        ]

    def next_attempt(self, number: int) -> None:
        """Reset the record for a new attempt that continues after the delivered tokens."""
        self.become(RequestStatus.WAITING)
        self.attempt = number
        self.worker = self.decode = None
        self.transferring = NO_CHOICES
        self.arriving = Arriving()
        self.awaited_version = None
        self.resumed = {choice: list(tokens) for choice, tokens in self.outputs.items() if tokens}

    def edit_refusal(self, event: ClientEdit) -> RequestError | None:
        """Return the reason to reject an edit, or None."""
        opened = self.opened
        if not opened.open:
            return RequestError(f"the prompt of {event.request} is finished", status=409)
        if event.version <= opened.version:
            message = f"version {event.version} is not newer than {opened.version}, the current one"
            return RequestError(message, status=409)
        if not 0 <= event.retained <= len(opened.prompt):
            message = f"retained is {event.retained}, but the prompt has {len(opened.prompt)} tokens"
            return RequestError(message, status=400)
        if not 0 <= event.tail <= event.retained + len(event.tokens):
            return RequestError(f"tail is {event.tail}, more than the prompt's tokens", status=400)
        if event.params is not None and event.params.n != opened.params.n:
            return RequestError("the number of choices (n) cannot change", status=400)
        return None

    def edit(self, event: ClientEdit, now: float) -> Edited:
        """Apply an edit of the prompt that arrived at `now`."""
        before = self.opened
        self.opened = msgspec.structs.replace(
            before,
            prompt=before.prompt[: event.retained] + event.tokens,
            params=event.params or before.params,
            open=not event.finish,
            tail=event.tail,
            version=event.version,
        )
        same = (self.opened.prompt, self.opened.params) == (before.prompt, before.params)
        self.arriving.retain(event.retained)
        if event.finish:
            self.since = now
        if same or not before.answer_early:
            return Edited(not same, 0)
        self.awaited_version = event.version if self.status is not RequestStatus.WAITING else None
        withdrawn = sum(map(len, self.outputs.values()))
        if withdrawn:
            self.outputs = no_outputs(before.params.n)
            self.resumed = NO_OUTPUTS
            self.first_token_at.clear()
        return Edited(True, withdrawn)

    def submit(self, phase: Phase, hold: bool = False) -> Submit:
        """Return the message that submits this attempt to a worker. It continues after the tokens that were
        delivered before the attempt began. With `hold`, the worker holds back the first token until blocks at
        the decode worker are reserved."""
        own = {"params": self.limited(self.opened.params), "cache_salt": self.cache_salt}
        choices = sorted(self.open_choices)
        return Submit(
            **self.opened.fields() | own,
            attempt=self.attempt,
            outputs={choice: self.resumed.get(choice, []) for choice in choices},
            arrival=self.since,
            began={choice: self.first_token_at[choice] for choice in choices if choice in self.resumed},
            phase=phase,
            hold=hold,
            rescheduled=self.admitted,
            kind=self.kind,
        )

    def accept(self, event: Event, now: float) -> Event | None:
        """Return the event if it is new to the client at `now`, else None. Raises GapError if an earlier
        token is missing."""
        if event.attempt != self.attempt:
            return None
        if isinstance(event, PromptLogprobs):
            return self._accept_prompt_logprobs(event)
        if isinstance(event, Pooled):
            return event if self.open_choices else None
        if isinstance(event, Progress):
            if event.version != self.opened.version:
                return None
            self.arriving.computed = event.computed
            return event
        if isinstance(event, OutputWithdrawn):  # the client was notified when the edit was processed
            if self.awaited_version is not None and event.version >= self.awaited_version:
                self.awaited_version = None
            return None
        if event.choice not in self.open_choices:
            return None
        if isinstance(event, Admitted):
            fresh, self.admitted = not self.admitted, True
            return event if fresh else None
        if isinstance(event, Finished):
            self._end(event.choice)
            return event
        # Output for the prompt before the edit, which the worker has not confirmed yet.
        if self.awaited_version is not None:
            return None
        if isinstance(event, DraftVerified):
            return event
        delivered = self.outputs[event.choice]
        if event.index > len(delivered):
            raise GapError(f"token {event.index} of choice {event.choice} came after {len(delivered)} tokens")
        if event.index < len(delivered):
            return None
        # Before the first token the mapping is shared by all requests (no_outputs): copy it, then append.
        if delivered:
            delivered.append(event.token)
        else:
            self.outputs = {**self.outputs, event.choice: [event.token]}
            self.first_token_at[event.choice] = now
        if event.finish:
            self._end(event.choice)
        return event

    def _end(self, choice: int) -> None:
        self.open_choices -= {choice}
        self.transferring -= {choice}

    def _accept_prompt_logprobs(self, event: PromptLogprobs) -> PromptLogprobs | None:
        """Return the part of the prompt log-probabilities that is new, or None. A next attempt recomputes the
        prompt, perhaps in other chunks."""
        seen, first = self.prompt_logprobs, event.start - 1
        if first > seen:
            raise GapError(f"prompt position {event.start} came after {seen} positions")
        if first + len(event.entries) <= seen:
            return None
        self.prompt_logprobs = first + len(event.entries)
        return PromptLogprobs(event.request, event.attempt, seen + 1, event.entries[seen - first :])
