"""The journal of a simulated worker."""

from collections.abc import Callable, Iterator, Sequence

from streamserve.contracts.plan import StepPlan
from streamserve.engine.observer import Journal, StepPhase
from streamserve.engine.sequence import EngineSequence
from streamserve.protocol.messages import ToEngine
from streamserve.simulate.faults import PoisonPhase


class SimulatedJournal(Journal):
    """The present work of one worker, as a real worker records it in its journal. `on_phase` is called with
    each request and the phase that it reaches. It raises InjectedCrash if that crashes the worker."""

    def __init__(self, on_phase: Callable[[str, PoisonPhase], None]) -> None:
        self._on_phase = on_phase
        self.phase = ""
        self.suspects: frozenset[int] | None = frozenset()
        self.step: tuple[str, frozenset[int] | None] = ("", frozenset())
        """The latest step's phase and members: the step is being computed until its time is over."""
        self.predicted = 0.0

    def note(self, message: ToEngine) -> None:
        attempt = getattr(message, "attempt", None)
        self._note("message", frozenset(() if attempt is None else (attempt,)))

    def enter(
        self,
        phase: StepPhase,
        members: Sequence[EngineSequence] | None,
        predicted: float = 0.0,
        plan: StepPlan | None = None,
    ) -> None:
        self._note(phase, None if members is None else frozenset(s.attempt for s in members))
        if phase in ("run", "verify", "swap"):
            self.step, self.predicted = (phase, self.suspects), predicted
        for request, reached in _phases_reached(phase, members or (), plan):
            self._on_phase(request, reached)

    def leave(self, moving: Sequence[EngineSequence]) -> None:
        self._note("transfer" if moving else "", frozenset(s.attempt for s in moving))
        for sequence in moving:
            self._on_phase(sequence.request, "transfer")

    def _note(self, phase: str, suspects: frozenset[int] | None) -> None:
        self.phase, self.suspects = phase, suspects


def _phases_reached(
    phase: StepPhase, members: Sequence[EngineSequence], plan: StepPlan | None
) -> Iterator[tuple[str, PoisonPhase]]:
    """Yield the requests, and the phases that they reach in the terms of a Poison."""
    if phase == "draft":
        yield from ((sequence.request, "draft") for sequence in members)
    if plan is None or phase == "commit":
        return
    spans = {span.sequence: span for span in plan.spans}
    for sequence in members:
        span = spans.get(sequence.id)
        if span is None:
            if phase == "swap":
                yield sequence.request, "swap"
            continue
        yield sequence.request, "decode" if sequence.decoding else "prefill"
        if span.tree is not None and len(span.tree) > 1:
            yield sequence.request, "verify"
