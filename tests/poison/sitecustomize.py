"""Python runs this module when it starts, if its folder is in PYTHONPATH: in the workers of
test_containment.py.

TEST_FAULT is "KIND PHASE [co-batched]": poison requests, whose ids begin with "poison" or which have the seed
1313, end every worker that reaches this phase of a step with them; with `co-batched` only in a batch with
other requests. The kinds: crash (SIGSEGV), exit, raise; slow (a long step, as predicted) and hang, each once,
unless the file TEST_FAULT_DONE exists. "device run": the tenth wait for a device fails, once."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

fault = os.environ.get("TEST_FAULT")
if fault:
    from streamserve.contracts.plan import StepPlan
    from streamserve.engine.observer import StepPhase
    from streamserve.engine.sequence import EngineSequence
    from streamserve.workers.journal import StepJournal

    kind, target_phase, *co_batched = fault.split()
    enter, leave = StepJournal.enter, StepJournal.leave

    def is_poison(sequence: EngineSequence) -> bool:
        """Return whether this is a poison request."""
        return sequence.request.startswith("poison") or sequence.params.seed == 1313

    def inject() -> None:
        """Execute the fault that the test asks for."""
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif kind == "exit":
            os._exit(3)
        elif kind == "raise":
            raise IndexError("a fault that was injected")

    def sleep_once(seconds: float) -> None:
        """Sleep once."""
        done = Path(os.environ["TEST_FAULT_DONE"])
        if not done.exists():
            done.touch()
            time.sleep(seconds)

    def phases(members: Sequence[EngineSequence], phase: StepPhase, plan: StepPlan | None) -> set[str]:
        """Return the phases in which the members of a batch have poison requests."""
        if co_batched and all(is_poison(sequence) for sequence in members):
            return set()
        spans = {span.sequence: span for span in plan.spans} if plan and phase != "commit" else {}
        result = set()
        for sequence in members:
            if not is_poison(sequence):
                continue
            result |= {phase} & {"draft", "commit"}
            span = spans.get(sequence.id)
            if span is not None:
                result.add("decode" if sequence.decoding else "prefill")
                if span.tree is not None and len(span.tree) > 1:
                    result.add("verify")
            elif phase == "swap":
                result.add("swap")
        return result

    def faulty_enter(
        self: StepJournal,
        phase: StepPhase,
        members: Sequence[EngineSequence] | None,
        predicted: float = 0.0,
        plan: StepPlan | None = None,
    ) -> None:
        matches = target_phase in phases(members or (), phase, plan)
        enter(self, phase, members, 100.0 if matches and kind == "slow" else predicted, plan)
        if matches and kind in ("slow", "hang"):
            sleep_once(5.0 if kind == "slow" else 600.0)
        elif matches:
            inject()

    def faulty_leave(self: StepJournal, moving: Sequence[EngineSequence]) -> None:
        leave(self, moving)
        poison_only = bool(co_batched) and all(is_poison(sequence) for sequence in moving)
        if target_phase == "transfer" and not poison_only and any(is_poison(sequence) for sequence in moving):
            inject()

    if kind == "device":
        from streamserve.execution.backends.cuda.runner import Fetch

        waits = 0

        def failing_wait(self: Fetch) -> None:
            """Raise the error that torch raises after an error of the device."""
            global waits
            waits += 1
            done = Path(os.environ["TEST_FAULT_DONE"])
            if waits == 10 and not done.exists():
                done.touch()
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        Fetch.wait = failing_wait  # type: ignore[method-assign]

    StepJournal.enter = faulty_enter  # type: ignore[method-assign]
    StepJournal.leave = faulty_leave  # type: ignore[method-assign]
