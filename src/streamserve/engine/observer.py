"""The named moments of a request's life in an engine: for traces, and for tests that end a worker there.

submitted ─ reserved ─ first chunk ─ mid-layer push … ─ output 0 ─ last layer landed
          ─ (mid-draft ─ verified-before-commit) … ─ finishing;   swap and edit where they happen
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from streamserve.engine.plan import StepPlan
from streamserve.engine.sequence import Sequence as Running
from streamserve.protocol.messages import RETURN, ToEngine

Moment = Literal[
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
"""`mid-layer push`: KV is on its way. `mid-draft`: the drafter is at work. `verified-before-commit`: the
target's step is done, and nothing of it is kept yet."""


StepPhase = Literal["plan", "draft", "run", "verify", "swap", "commit"]
"""What a step is at: `run` computes without draft tokens, `verify` with some, `swap` beside swap copies."""


class Journal(Protocol):
    """Is told what an engine is about to do, so that what is known of it survives the process."""

    def take(self, message: ToEngine) -> None:
        """A message is about to be handled."""
        ...

    def enter(
        self,
        phase: StepPhase,
        members: Sequence[Running] | None,
        predicted: float = 0.0,
        plan: StepPlan | None = None,
    ) -> None:
        """A phase of a step begins over these sequences, all there are if None. `predicted` seconds are
        expected of it; `plan` is what is carried out."""
        ...

    def leave(self, moving: Sequence[Running]) -> None:
        """The step, or the message, is over; what goes on is the transfer of these sequences' KV."""
        ...


class Unwritten:
    """A journal that is not kept."""

    def take(self, message: ToEngine) -> None:
        """Nothing."""

    def enter(
        self,
        phase: StepPhase,
        members: Sequence[Running] | None,
        predicted: float = 0.0,
        plan: StepPlan | None = None,
    ) -> None:
        """Nothing."""

    def leave(self, moving: Sequence[Running]) -> None:
        """Nothing."""


class Watch(Protocol):
    """Is told what happens in an engine, when it happens."""

    def moment(self, name: Moment, request: str = "") -> None:
        """This moment of a request has come; of no one request's where all in a step share it."""
        ...

    def ran(self, rows: Sequence[tuple[str, int]], seconds: float) -> None:
        """A step over so many rows of these requests took `seconds` until now."""
        ...


class Unwatched:
    """Nobody looks."""

    def moment(self, name: Moment, request: str = "") -> None:
        """Nothing."""

    def ran(self, rows: Sequence[tuple[str, int]], seconds: float) -> None:
        """Nothing."""


class OfClients:
    """Tells `watch` of clients' requests, not of answers on their way back."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def moment(self, name: Moment, request: str = "") -> None:
        """Pass it on."""
        if not request.startswith(RETURN):
            self._watch.moment(name, request)

    def ran(self, rows: Sequence[tuple[str, int]], seconds: float) -> None:
        """Pass it on."""
        self._watch.ran([row for row in rows if not row[0].startswith(RETURN)], seconds)
