"""The processes of workers, and two kinds of memory that a worker shares with the server. Both outlive the
worker's process.

memfd of a journal ── inherited ──▶ the worker records what it computes at present (protocol/journal.py)
                   ── mapped ─────▶ the server reads it: signs of life while the worker runs; after a crash,
                                    the requests that were in the last step
memfd of weights ──── inherited ──▶ the first worker writes the weights, all workers map them
                                    (backends/native/weight_arena.py)
"""

import asyncio
import contextlib
import math
import mmap
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from streamserve.fleet.child_process import ChildProcess, start_program
from streamserve.fleet.endings import ending_of, status_in_words
from streamserve.fleet.events import Heartbeat, Retire, Start, WorkerDead, WorkerLost
from streamserve.fleet.fork_server import fork_server
from streamserve.fleet.launcher import Launch, Launched
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.journal import JOURNAL_BYTES, Entry, read_journal
from streamserve.protocol.lease import LEASE
from streamserve.system.instructions import KERNEL_PATH_VARIABLE, pytorch_bounds
from streamserve.system.oom_kills import oom_kills, rose

STOP_SECONDS = 10.0
LIFE_SECONDS = 2.0
"""A worker that is exiting is killed after this many seconds without a sign of life. A worker gives four
signs of life a second."""
LOOK_SECONDS = 5.0
"""Seconds between two readings of the kernel's counters of processes killed for lack of memory."""
UNKILLABLE_SECONDS = 10.0
"""Seconds that a killed process may take to end before it counts as lost."""
GPU_DRIVER = Path("/dev/nvidiactl")

WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}
"""Defaults for a worker's environment:

- Idle threads of OpenMP sleep. Spinning threads take the cores from the threads they wait for, this process
  included; they made steps ten times slower on a machine with other load.
- OpenBLAS has one thread: workers multiply no large matrices with NumPy, and a thread pool started by its
  import would prevent forks.
"""


class WorkerProcess:
    """A started process and its journal."""

    def __init__(self, process: ChildProcess, journal: mmap.mmap) -> None:
        self._process = process
        self._journal = journal
        self._killed_at = math.inf

    @property
    def pid(self) -> int:
        return self._process.pid

    def beat(self) -> Heartbeat | None:
        """Return the process's last sign of life; None once the process has ended."""
        if self._journal.closed:
            return None
        entry = read_journal(self._journal)
        return Heartbeat(entry.beat_at, entry.phase, entry.moved_at, entry.predicted)

    async def watch(self, worker: str, incarnation: int) -> WorkerLost:
        """Wait for the end of the process; return what it was doing then. A process that was killed but does
        not end, because it waits for a disk or a device, is reported as lost."""
        code, out_of_memory, unkillable = await self._end()
        entry = Entry() if self._journal.closed else read_journal(self._journal)
        self._journal.close()
        reason = entry.words or f"its process ended with {status_in_words(code)}"
        if unkillable:
            reason = "it was killed, but its process has not ended: it may be waiting for a disk or a device"
        ending = ending_of(code, out_of_memory)
        return WorkerLost(
            worker, incarnation, reason, entry.attempts, entry.phase, entry.report, not unkillable, ending
        )

    async def _end(self) -> tuple[int | None, bool, bool]:
        """Wait for the end of the process. Return its exit status, whether the kernel killed a process for
        lack of memory in the last seconds, and whether the process was killed but does not end."""
        ended = asyncio.ensure_future(self._process.wait())
        earlier = latest = oom_kills()
        try:
            while not (await asyncio.wait({ended}, timeout=LOOK_SECONDS))[0]:
                earlier, latest = latest, oom_kills()
                if time.monotonic() - self._killed_at > UNKILLABLE_SECONDS:
                    return None, False, True
            return ended.result(), rose(earlier, oom_kills()), False
        finally:
            ended.cancel()

    def extend(self, until: float) -> None:
        """Extend the lease of the process: tell it until when, on this machine's clock, it may run."""
        self._process.write(LEASE.pack(until))

    async def dead(self) -> None:
        """Wait for the end of the process, which `watch` has seen unless it could not be killed."""
        await self._process.wait()

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self._killed_at = min(self._killed_at, time.monotonic())
        self._process.kill()

    async def stop(self, grace: float = 0.0) -> None:
        """Wait for the end of a process that is exiting. After `grace` seconds its standard input is closed,
        which tells it to exit. It is killed `STOP_SECONDS` later, or once it gives no signs of life: a
        stopped process would not exit."""
        try:
            if grace:
                await self._ended_within(grace)
            self._process.close_input()
            until = time.monotonic() + STOP_SECONDS
            while not await self._ended_within(LIFE_SECONDS / 4):
                if time.monotonic() > until or self._silent:
                    self.kill()
                    await self._ended_within(STOP_SECONDS)
                    return
        finally:
            self._journal.close()

    async def _ended_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for the end of the process; return whether it has ended."""
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            return False
        return True

    @property
    def _silent(self) -> bool:
        """Whether a process that gave signs of life has stopped giving them."""
        beat = self.beat()
        return beat is not None and 0 < beat.at < time.monotonic() - LIFE_SECONDS


class WorkerProcesses:
    """The processes that run now.

    - `configure`: returns the configuration of a worker's next process, by name and incarnation.
    - `lost`: called with the end of each process that was not asked to end.
    - `dead`: called when a process that was only lost is certain to be dead.
    """

    def __init__(
        self,
        launch: Launch,
        configure: Callable[[str, int], WorkerConfig],
        lost: Callable[[WorkerLost], Awaitable[None]],
        dead: Callable[[WorkerDead], Awaitable[None]] | None = None,
    ) -> None:
        self._launch = launch
        self._configure = configure
        self._lost = lost
        self._dead = dead
        self._running: dict[str, tuple[int, Launched]] = {}
        self._starting: set[Retire] = set()
        self._retired: set[Retire] = set()
        self._leaving: set[Launched] = set()
        self._closing = False

    def pid(self, worker: str) -> int:
        """Return the id of a worker's latest process."""
        return self._running[worker][1].pid

    def beats(self) -> dict[tuple[str, int], Heartbeat]:
        """Return the last sign of life of each running process, by name and incarnation."""
        latest = {(name, number): process.beat() for name, (number, process) in self._running.items()}
        return {key: beat for key, beat in latest.items() if beat}

    async def run(self, start: Start) -> None:
        """Start a process and report its end, unless it is retired. A failed start is reported as a loss."""
        key = Retire(start.worker, start.incarnation)
        self._starting.add(key)
        try:
            await self._run(start, key)
        finally:
            self._starting.discard(key)
            self._retired.discard(key)

    async def _run(self, start: Start, key: Retire) -> None:
        await asyncio.sleep(start.after)
        if self._closing or key in self._retired:
            return
        worker, incarnation = start.worker, start.incarnation
        try:
            process = await self._launch(self._configure(worker, incarnation))
        except OSError as error:
            lost = WorkerLost(worker, incarnation, f"it could not be started: {error}", frozenset())
        else:
            if self._closing or key in self._retired:
                await self._stop(process)
                return
            self._running[worker] = incarnation, process
            lost = await process.watch(worker, incarnation)
        if not self._closing and key not in self._retired:
            await self._lost(lost)
        if not lost.dead and self._dead:
            await process.dead()
            await self._dead(WorkerDead(worker, incarnation))

    async def retire(self, retire: Retire) -> None:
        """End the process of a worker that was removed, even if it is just being started. Its end is not
        reported."""
        if retire not in self._starting:
            return
        self._retired.add(retire)
        incarnation, process = self._running.get(retire.worker, (0, None))
        if process and incarnation == retire.incarnation:
            del self._running[retire.worker]
            await self._stop(process)

    async def _stop(self, process: Launched) -> None:
        self._leaving.add(process)
        try:
            await process.stop()
        finally:
            self._leaving.discard(process)

    def kill(self, worker: str) -> None:
        """Kill a worker's process; its loss is reported like any other."""
        if worker in self._running:
            self._running[worker][1].kill()

    async def close(self, grace: float = 0.0) -> None:
        """Start no more processes; stop all processes and wait for their ends, as `Launched.stop` does."""
        self._closing = True
        running = [process for _, process in self._running.values()]
        await asyncio.gather(*(process.stop(grace) for process in (*running, *self._leaving)))


class SharedWeightsMemory:
    """The memory that the workers of one server share on this host: two unnamed files, for the weights of the
    target and of a draft model. The first worker fills them (backends/native/weight_arena.py). The memory is
    free when this object is closed and the workers have ended, in whatever way."""

    def __init__(self) -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        names = ("streamserve-weights", "streamserve-draft-weights")
        self._files = [os.fdopen(os.memfd_create(name, flags), "rb+", buffering=0) for name in names]

    async def start_worker(self, config: WorkerConfig, fork: bool = True) -> WorkerProcess:
        """Start a worker that shares the memory. Raises OSError if that is not possible now."""
        return await start_worker(config, tuple(file.fileno() for file in self._files), fork)

    def close(self) -> None:
        """Close the files; idempotent."""
        for file in self._files:
            file.close()


async def start_worker(
    config: WorkerConfig, weights: tuple[int, ...] = (), fork: bool = True
) -> WorkerProcess:
    """Start a worker. `weights` are the descriptors of memory for shared weights. If `fork`, the worker is
    forked where possible. Raises OSError if it cannot be started now."""
    journal, descriptor = _journal()
    try:
        process = await start_program(
            "worker",
            config.worker,
            worker_environment(),
            (descriptor, *weights),
            fork=fork and not may_use_gpu(config.model.device),
        )
    finally:
        os.close(descriptor)
    data = msgspec.msgpack.encode(msgspec.structs.replace(config, journal=descriptor, weights=weights))
    process.write(len(data).to_bytes(4, "little") + data)
    return WorkerProcess(process, journal)


@contextlib.contextmanager
def prepared_fork_server(wanted: bool = True) -> Iterator[None]:
    """If `wanted`, import in the background what workers need, for workers that are started within the
    block."""
    if not wanted:
        yield
        return
    server = fork_server()
    server.hold(worker_environment())
    try:
        yield
    finally:
        server.release()


def may_use_gpu(device: str) -> bool:
    """Return whether a worker on this device may use a GPU, whose driver must not be forked."""
    return device.startswith("cuda") or (device == "auto" and GPU_DRIVER.exists())


def worker_environment() -> dict[str, str]:
    """Return the environment variables of a worker, its fork server, or a memory plan."""
    return WORKER_ENVIRONMENT | pytorch_bounds() | _without_settings(os.environ)


def _journal() -> tuple[mmap.mmap, int]:
    """Return the memory of a journal and its file descriptor. All of it is allocated now: later, memory may
    be short."""
    descriptor = os.memfd_create("streamserve-journal", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, JOURNAL_BYTES)
        return mmap.mmap(descriptor, JOURNAL_BYTES), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the server's settings, which include keys: a worker gets its
    configuration on its standard input. The variable that chooses the kernels is kept."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("STREAMSERVE_") or name == KERNEL_PATH_VARIABLE
    }
