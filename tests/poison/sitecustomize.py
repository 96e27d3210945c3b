"""Python runs this when it starts, where its folder is in PYTHONPATH: in the workers of test_containment.py.

TEST_FAULT is "KIND PHASE [company]": requests whose names begin with "poison", or that have the seed 1313,
end every worker that comes to this phase of a step with them; where `company` is given, only in one batch
with others. The kinds: kill (SIGKILL), exit, raise; slow (a long step, as was predicted) and hang, each once,
if the file TEST_FAULT_DONE is not there."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

fault = os.environ.get("TEST_FAULT")
if fault:
    from streamserve.engine.observer import StepPhase
    from streamserve.engine.plan import StepPlan
    from streamserve.engine.sequence import Sequence as Running
    from streamserve.workers.journal import StepJournal

    kind, at, *company = fault.split()
    enter, leave = StepJournal.enter, StepJournal.leave

    def marked(sequence: Running) -> bool:
        """Whether the fault is this request's."""
        return sequence.request.startswith("poison") or sequence.params.seed == 1313

    def strike() -> None:
        """Do what was asked for."""
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "exit":
            os._exit(3)
        elif kind == "raise":
            raise IndexError("a fault that was injected")

    def late(seconds: float) -> None:
        """Take so long, once."""
        done = Path(os.environ["TEST_FAULT_DONE"])
        if not done.exists():
            done.touch()
            time.sleep(seconds)

    def phases(members: Sequence[Running], phase: StepPhase, plan: StepPlan | None) -> set[str]:
        """What the marked sequences among the members are at."""
        if company and all(marked(sequence) for sequence in members):
            return set()
        spans = {span.sequence: span for span in plan.spans} if plan and phase != "commit" else {}
        found = set()
        for sequence in members:
            if not marked(sequence):
                continue
            found |= {phase} & {"draft", "commit"}
            span = spans.get(sequence.id)
            if span is not None:
                found.add("decode" if sequence.decoding else "prefill")
                if span.tree is not None and len(span.tree) > 1:
                    found.add("verify")
            elif phase == "swap":
                found.add("swap")
        return found

    def faulty_enter(
        self: StepJournal,
        phase: StepPhase,
        members: Sequence[Running] | None,
        predicted: float = 0.0,
        plan: StepPlan | None = None,
    ) -> None:
        struck = at in phases(members or (), phase, plan)
        enter(self, phase, members, 100.0 if struck and kind == "slow" else predicted, plan)
        if struck and kind in ("slow", "hang"):
            late(5.0 if kind == "slow" else 600.0)
        elif struck:
            strike()

    def faulty_leave(self: StepJournal, moving: Sequence[Running]) -> None:
        leave(self, moving)
        alone = bool(company) and all(marked(one) for one in moving)
        if at == "transfer" and not alone and any(marked(one) for one in moving):
            strike()

    StepJournal.enter = faulty_enter  # type: ignore[method-assign]
    StepJournal.leave = faulty_leave  # type: ignore[method-assign]
