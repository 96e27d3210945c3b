"""The end of a worker's process is reported correctly: real processes and signals, and a process that cannot
be killed."""

import asyncio
import mmap
import signal
import sys
import time
from itertools import chain, repeat

import pytest

from streamserve.fleet import worker_process
from streamserve.fleet.child_process import StartedChild
from streamserve.fleet.worker_process import WorkerProcess
from streamserve.protocol.journal import JOURNAL_BYTES, JournalWriter

SLEEP = "import sys; print(); sys.stdout.flush(); sys.stdin.read()"
SLEEP_ON = "import sys, time; print(); sys.stdout.flush(); time.sleep(600)"


async def sleeping(program: str = SLEEP) -> tuple[WorkerProcess, JournalWriter]:
    """Return a sleeping process, which reads its standard input or not, and the writer of its journal."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    memory = mmap.mmap(-1, JOURNAL_BYTES)
    return WorkerProcess(StartedChild(process), memory), JournalWriter(memory)


@pytest.mark.parametrize(
    ("number", "ending"),
    [(signal.SIGTERM, "outside"), (signal.SIGKILL, "unclear"), (signal.SIGSEGV, "fault")],
)
async def test_the_signal_that_ended_a_process_says_how(number: signal.Signals, ending: str) -> None:
    process, journal = await sleeping()
    journal.write("run", [3], 1.0)
    watching = asyncio.create_task(process.watch("w", 1))
    process._process._process.send_signal(number)
    lost = await asyncio.wait_for(watching, 60)
    assert (lost.ending, lost.dead, lost.phase, lost.suspects) == (ending, True, "run", frozenset((3,)))
    assert lost.reason == f"its process ended with {number.name}"


async def test_a_process_killed_for_want_of_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = chain([(4,)], repeat((5,)))
    monkeypatch.setattr(worker_process, "oom_kills", lambda: next(counters))
    process, _ = await sleeping()
    watching = asyncio.create_task(process.watch("w", 1))
    await asyncio.sleep(0)
    process.kill()
    assert (await asyncio.wait_for(watching, 60)).ending == "fault"


async def test_a_process_that_cannot_be_killed_is_lost_and_its_end_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that cannot be killed counts as lost, and its end is noticed later: such a process waits for
    a disk, and the signal is delivered afterwards."""
    monkeypatch.setattr(worker_process, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(worker_process, "UNKILLABLE_SECONDS", 0.2)
    process, _ = await sleeping()
    kill = process._process.kill
    monkeypatch.setattr(process._process, "kill", lambda: None)
    watching = asyncio.create_task(process.watch("w", 1))
    process.kill()
    lost = await asyncio.wait_for(watching, 60)
    assert (lost.dead, lost.ending) == (False, "unclear")
    assert "it was killed, but its process has not ended" in lost.reason
    ending = asyncio.create_task(process.dead())
    await asyncio.sleep(0.1)
    assert not ending.done()
    kill()
    await asyncio.wait_for(ending, 60)


async def test_a_process_that_is_to_exit_and_gives_no_sign_of_life_is_killed() -> None:
    for program, stopped in ((SLEEP, False), (SLEEP, True), (SLEEP_ON, True)):
        process, journal = await sleeping(program)
        journal.beat(time.monotonic() + (-60 if stopped else 60), 0.0)
        if stopped:
            process._process._process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        await process.stop()
        assert time.monotonic() - began < worker_process.STOP_SECONDS
        assert process._process._process.returncode == (-signal.SIGKILL if stopped else 0)
