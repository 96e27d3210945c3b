"""The lifecycle events of a request in an engine: for traces, and for tests that inject a crash at one.

submitted ─ reserved ─ first chunk ─ mid-layer push … ─ output 0 ─ last layer landed
          ─ (mid-draft ─ verified-before-commit) … ─ finishing;   swap and edit where they happen
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from streamserve.contracts.plan import StepPlan
from streamserve.engine.sequence import Sequence as Running
from streamserve.protocol.messages import COPY, ToEngine

LifecycleEvent = Literal[
    "submitted",
    "reserved",
    "first chunk",
    "mid-layer push",
    "last layer landed",
    "output 0",
    "mid-draft",
    "verified-before-commit",
    "swap",
    "edit",
    "finishing",
]
"""`mid-layer push`: KV is being sent. `mid-draft`: the drafter is working. `verified-before-commit`: the
target's step is done, and none of it is committed yet."""


StepPhase = Literal["plan", "draft", "run", "verify", "swap", "commit"]
"""Phase of a step: `run` computes without draft tokens, `verify` with some, `swap` while swap copies run."""


class Journal(Protocol):
    """Records what an engine is about to do, so that the record survives the process."""

    def take(self, message: ToEngine) -> None:
        """Record that a message is about to be handled."""
        ...

    def enter(
        self,
        phase: StepPhase,
        members: Sequence[Running] | None,
        predicted: float = 0.0,
        plan: StepPlan | None = None,
    ) -> None:
        """Record that a phase of a step begins over these sequences, over all if None. It is predicted to
        take `predicted` seconds; `plan` is what is executed."""
        ...

    def leave(self, moving: Sequence[Running]) -> None:
        """Record that the step, or the message, is done; only the KV transfers of these sequences
        continue."""
        ...


class NullJournal:
    """A journal that records nothing."""

    def take(self, message: ToEngine) -> None:
        """Do nothing."""

    def enter(
        self,
        phase: StepPhase,
        members: Sequence[Running] | None,
        predicted: float = 0.0,
        plan: StepPlan | None = None,
    ) -> None:
        """Do nothing."""

    def leave(self, moving: Sequence[Running]) -> None:
        """Do nothing."""


class Observer(Protocol):
    """Observes an engine: receives events when they happen."""

    def on_event(self, name: LifecycleEvent, request: str = "") -> None:
        """Receive a lifecycle event of a request; `request` is empty for an event that all in a step
        share."""
        ...

    def on_step(self, query_tokens: Sequence[tuple[str, int]], seconds: float) -> None:
        """Receive that a step has ended which took `seconds`; `query_tokens`: those of each request."""
        ...


class NoObserver:
    """An observer that does nothing."""

    def on_event(self, name: LifecycleEvent, request: str = "") -> None:
        """Do nothing."""

    def on_step(self, query_tokens: Sequence[tuple[str, int]], seconds: float) -> None:
        """Do nothing."""


class ClientObserver:
    """Passes the events of clients' requests on to `observer`, without those of cache copies."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def on_event(self, name: LifecycleEvent, request: str = "") -> None:
        """Pass the event on if it is of a client's request."""
        if not request.startswith(COPY):
            self._observer.on_event(name, request)

    def on_step(self, query_tokens: Sequence[tuple[str, int]], seconds: float) -> None:
        """Pass the step on, with its clients' requests only."""
        self._observer.on_step([row for row in query_tokens if not row[0].startswith(COPY)], seconds)
