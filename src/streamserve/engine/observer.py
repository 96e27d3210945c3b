"""The lifecycle events of a request in an engine, for traces and for tests that inject crashes at an event.

submitted ─ reserved ─ first chunk ─ mid-layer push … ─ output 0 ─ last layer landed
          ─ (mid-draft ─ verified-before-commit) … ─ finishing;   swap and edit at any point
"""

from collections.abc import Sequence
from typing import Literal

from streamserve.contracts.plan import StepPlan
from streamserve.engine.sequence import EngineSequence
from streamserve.protocol.messages import ToEngine

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
target's step has ended, and none of its results is committed yet."""


StepPhase = Literal["plan", "draft", "run", "verify", "swap", "commit"]
"""Phase of a step. The target's pass is `run` without draft tokens, `verify` with draft tokens, and `swap` if
swap copies run at the same time."""


class Journal:
    """A record of what an engine is about to do, which survives the process: it names the suspects of a
    crash. This class records nothing; subclasses do."""

    def note(self, message: ToEngine) -> None:
        """Record that a message is about to be handled."""

    def enter(
        self,
        phase: StepPhase,
        members: Sequence[EngineSequence] | None,
        predicted: float = 0.0,
        plan: StepPlan | None = None,
    ) -> None:
        """Record that a phase of a step begins. `members` are its sequences (None: all). The phase is
        predicted to take `predicted` seconds. `plan` is the executed step."""

    def leave(self, moving: Sequence[EngineSequence]) -> None:
        """Record that the step or the message is done. Only the KV transfers of the sequences in `moving`
        continue."""


class Observer:
    """A receiver of an engine's events about clients' requests, called when they happen. It gets no events of
    cache copies. This class ignores them; subclasses do not."""

    def on_event(self, name: LifecycleEvent, request: str = "") -> None:
        """Receive a lifecycle event of a request. `request` is empty for an event of a whole step."""

    def on_step(self, query_tokens: Sequence[tuple[str, int]], seconds: float) -> None:
        """Receive the end of a step that took `seconds`. `query_tokens` are pairs of request and its query
        tokens."""
