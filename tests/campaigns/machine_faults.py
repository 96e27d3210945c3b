"""The family `machine_faults`: machines that are lost or slow at each lifecycle event, in network namespaces.
12 events and 6 faults in 72 seeds, then the other half of the pair. Where Ray places the agents, there is its
own fault instead."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.campaigns.outcome import UNAVAILABLE, WRONG_TEXT, Outcome
from tests.extras.cluster.machine_faults import (
    EVENTS,
    FAULTS,
    RAY_FAULTS,
    STREAMS,
    WORKERS,
    Launched,
    MachineFaults,
    machine_faults,
)
from tests.extras.cluster.namespaces import why_no_wire
from tests.extras.cluster.ray_machines import why_no_ray

CASES = len(EVENTS) * len(FAULTS)


def case(seed: int) -> tuple[str, str, str]:
    """Return the event, the fault and the worker of a seed. Each event occurs with each fault within CASES
    seeds."""
    names = list(FAULTS)
    event = EVENTS[seed % len(EVENTS)]
    fault = names[(seed + seed // len(EVENTS)) % len(names)]
    return event, fault, WORKERS[seed // CASES % len(WORKERS)]


def ray_case(seed: int) -> tuple[str, str, str]:
    """Return the event, the fault and the worker of a seed for trials in which Ray places the agents."""
    (fault,) = RAY_FAULTS
    return EVENTS[seed % len(EVENTS)], fault, WORKERS[seed // len(EVENTS) % len(WORKERS)]


class Faults:
    """Trials on the same machines, which are created again after a failure."""

    def __init__(self, runner: asyncio.Runner, launched: Launched) -> None:
        self._runner = runner
        self._launched = launched
        self._case = ray_case if launched == "ray" else case
        self._stack = AsyncExitStack()
        self._made: MachineFaults | None = None
        self._refused = why_no_wire() or (why_no_ray() if launched == "ray" else "")

    def trial(self, seed: int) -> Outcome:
        if self._refused:
            return Outcome(verdict="refused", kind=UNAVAILABLE, detail=self._refused)
        event, fault, victim = self._case(seed)
        try:
            seconds = self._runner.run(self._trial(event, fault, victim))
        except AssertionError as error:
            self.close()
            detail = f"{event}, {fault}, {victim}: {error}"
            return Outcome(verdict="failed", kind=WRONG_TEXT, detail=detail)
        except BaseException:
            self.close()
            raise
        counts = {"streams": STREAMS, f"at {event}": 1, fault: 1, f"{fault}, ms": round(1000 * seconds)}
        return Outcome(verdict="passed", counts=counts, worst={fault: round(seconds, 2)})

    async def _trial(self, event: str, fault: str, victim: str) -> float:
        if self._made is None:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self._made = await self._stack.enter_async_context(machine_faults(folder, self._launched))
        return await self._made.trial(event, fault, victim)

    def close(self) -> None:
        """Remove the machines."""
        self._made = None
        self._runner.run(self._stack.aclose())

    def figures(self) -> dict[str, Any]:
        return {}


@contextmanager
def open_campaign(launched: Launched = "join") -> Iterator[Faults]:
    """Run trials in an event loop that exists as long as the campaign."""
    with asyncio.Runner() as runner:
        faults = Faults(runner, launched)
        try:
            yield faults
        finally:
            faults.close()
