"""Machines that are lost or slow at a lifecycle event of a request, under 16 streams.

    this machine: the head ══ bridge ══ wire ══ machine 1: an agent, half of a pair
                                ╚══════ wire ══ machine 2: an agent, the other half

The agents are started here, or by Ray, whose head is on this machine and which has a node on the others.

A trial loads the pair, waits until a worker reaches the event, and lets a fault happen there. Every answer
must be the one of a single local worker without faults, and the fault must have happened.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal, get_args
from unittest import mock

from streamserve.engine.observer import LifecycleEvent
from streamserve.llm.async_llm import AsyncLLM
from tests.checkpoints import make_checkpoint
from tests.events import SETTINGS, await_event, send_until, undisturbed
from tests.extras.cluster.machines import Machines, machines
from tests.extras.cluster.namespaces import WireProcess
from tests.extras.cluster.ray_machines import HERE, ray_machines
from tests.pairs import NUMBERS, fleet, make_requests, serving, until, wait_until_idle

EVENTS = (*get_args(LifecycleEvent), "draining")
STREAMS = 16
LEASE = 1.5
FAULT_SECONDS = 1.5 * LEASE
"""Seconds for which a link is disturbed: long enough for both sides to know that the lease is over."""
WORKERS = ("prefill-0", "decode-0")


class Disturbed:
    """The pair and its machines, during a fault of one of them."""

    def __init__(self, made: Machines, wire: WireProcess, number: int) -> None:
        self.made, self.wire, self.number = made, wire, number

    async def kill_worker(self) -> None:
        os.kill(self.made.workers(self.number)[0].pid, signal.SIGKILL)

    async def kill_machine(self) -> None:
        self.made.kill(self.number)
        await asyncio.sleep(LEASE / 3)
        self.made.join(self.number)

    async def cut_link(self) -> None:
        """Cut the link: both sides receive nothing and get no error."""
        self.made.net.cut(self.number)
        await asyncio.sleep(FAULT_SECONDS)
        self.made.net.restore(self.number)

    async def delay(self) -> None:
        """Delay frames in both directions by 200 ms while requests are open."""
        self.wire.set("delay 0.2")

    async def stall(self) -> None:
        """Hold frames in both directions, and deliver all of them later."""
        self.wire.set("stall")
        await asyncio.sleep(FAULT_SECONDS)
        self.wire.set("flow")

    async def half_open(self) -> None:
        """Make the link half-open: the machine receives nothing and reconnects repeatedly; the other side
        receives its frames."""
        self.wire.set("mute")
        await asyncio.sleep(FAULT_SECONDS)
        self.wire.set("flow")


Launched = Literal["join", "ray"]
Fault = tuple[Callable[[Disturbed], Awaitable[None]], str]
FAULTS: dict[str, Fault] = {
    "killed worker": (Disturbed.kill_worker, ""),
    "killed machine": (Disturbed.kill_machine, ""),
    "cut link": (Disturbed.cut_link, ""),
    "delay of 200 ms": (Disturbed.delay, "late"),
    "stall": (Disturbed.stall, "held"),
    "half-open connection": (Disturbed.half_open, "lost"),
}
"""Faults, with the frames of the wire that show that the fault happened. After a fault without frames the
worker is lost."""
HARMLESS = "delay of 200 ms"
RAY_FAULTS: dict[str, Fault] = {"killed Ray node": (Disturbed.kill_machine, "")}
"""Faults for agents that Ray places. The other faults do not depend on how agents are started."""


class MachineFaults:
    """A pair on two machines, and its `expected` answers."""

    def __init__(
        self,
        llm: AsyncLLM,
        made: Machines,
        wires: dict[int, WireProcess],
        folder: Path,
        expected: list[object],
    ) -> None:
        self._llm, self._made, self._wires = llm, made, wires
        self._reached, self._resume = folder / "reached", folder / "resume"
        self._folder = folder
        self._expected = expected
        self._requests = make_requests(12, 0)
        self._rounds = 0

    async def trial(self, event: str, fault: str, victim: str) -> float:
        """Let a fault happen to the machine of the worker `victim` at an event; return the seconds until all
        requests were answered and the pair was ready. Raises AssertionError."""
        llm, state = self._llm, fleet(self._llm)
        number = self._made.machine_of(victim)
        cause, shown = (FAULTS | RAY_FAULTS)[fault]
        disturbed = Disturbed(self._made, self._wires[number], number)
        working = await self._loaded("finishing" if event == "draining" else event)
        if event == "draining":
            await llm.drain(victim, True)
        before, frames = state.workers[victim].incarnation, disturbed.wire.counts()
        began = time.monotonic()
        happening = asyncio.create_task(cause(disturbed))
        await asyncio.sleep(0)
        self._resume.touch()
        try:
            answered = await asyncio.wait_for(working, 120)
        finally:
            await happening
        counts = disturbed.wire.counts()
        disturbed.wire.set("flow")
        assert answered == self._expected, (event, fault, victim)
        if fault != HARMLESS:
            await until(lambda: state.workers[victim].incarnation > before)
        if shown:
            assert counts[shown] > frames.get(shown, 0), "the fault has not happened"
        if event == "draining":
            await llm.drain(victim, False)
        await until(lambda: llm.health().ready and all(w.ready for w in state.workers.values()))
        seconds = time.monotonic() - began
        await wait_until_idle(llm)
        return seconds

    async def _loaded(self, event: str) -> "asyncio.Task[list[object]]":
        """Return the task of the requests that wait at the event."""
        self._rounds += 1
        self._reached.unlink(missing_ok=True)
        await_event(self._folder, self._rounds, 1 + self._rounds % 3, event)
        self._resume.unlink(missing_ok=True)
        return await send_until(self._reached, self._llm, self._requests, self._expected)


def _machines(launched: Launched, folder: Path) -> AbstractContextManager[Machines]:
    """Return machines that each run one half of a pair."""
    return ray_machines(2, HERE, slots=1) if launched == "ray" else machines(2, folder, HERE)


@asynccontextmanager
async def machine_faults(folder: Path, launched: Launched = "join") -> AsyncGenerator[MachineFaults, None]:
    """Serve a pair on two machines, whose agents join or are placed by Ray."""
    checkpoint = make_checkpoint(folder / "model")
    events = str(Path(__file__).parents[2] / "lifecycle_events")
    path = os.pathsep.join([events, os.environ.get("PYTHONPATH", "")])
    (folder / "resume").touch()
    expected = await undisturbed(checkpoint, make_requests(12, 0))
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(os.environ, {"PYTHONPATH": path, "TEST_EVENT_FOLDER": str(folder)})
        )
        made = stack.enter_context(_machines(launched, folder))
        wires = {number: stack.enter_context(made.net.wired(number)) for number in (1, 2)}
        for number in wires:
            made.join(number)
        async with serving(checkpoint, pairs=1, **SETTINGS, **made.settings(LEASE)) as llm:
            await llm.check_grammar(NUMBERS, "grammar")  # so that all requests can be sent at the same time
            yield MachineFaults(llm, made, wires, folder, expected)
