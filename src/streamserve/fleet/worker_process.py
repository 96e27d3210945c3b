"""A worker's process and its journal: shared memory that outlives the process.

memfd ── inherited ──▶ the worker writes its present state (protocol/journal.py)
      ── mapped ─────▶ the server reads it: beats while the worker runs, suspects when it has died
"""

import asyncio
import contextlib
import mmap
import os
import signal
import sys
from collections.abc import Mapping

import msgspec

from streamserve.fleet.events import Heartbeat, WorkerLost
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.journal import JOURNAL_BYTES, Entry, read_journal

STOP_SECONDS = 10.0

WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""By default a worker's idle threads sleep. Spinning ones take the cores from the threads they wait for, this
process included, and made steps ten times slower on a machine with other load."""


class WorkerProcess:
    """A started process and its journal."""

    def __init__(self, process: asyncio.subprocess.Process, journal: mmap.mmap) -> None:
        self._process = process
        self._journal = journal

    @property
    def pid(self) -> int:
        return self._process.pid

    def beat(self) -> Heartbeat | None:
        """Return its last sign of life; None once it has ended."""
        if self._journal.closed:
            return None
        entry = read_journal(self._journal)
        return Heartbeat(entry.beat_at, entry.phase, entry.moved_at, entry.predicted)

    async def lost(self, worker: str, incarnation: int) -> WorkerLost:
        """Wait for its end; return what it was doing then."""
        code = await self._process.wait()
        entry = Entry() if self._journal.closed else read_journal(self._journal)
        self._journal.close()
        reason = entry.words or f"its process ended with {_status(code)}"
        return WorkerLost(worker, incarnation, reason, entry.attempts, entry.phase, entry.report)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        """Wait for the end of a process that is exiting; kill it after `STOP_SECONDS`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        finally:
            self._journal.close()


async def start_worker(config: WorkerConfig) -> WorkerProcess:
    """Start a worker. Raises OSError if that is not possible now."""
    journal, descriptor = _journal()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "streamserve.workers",
            stdin=asyncio.subprocess.PIPE,
            env=WORKER_ENVIRONMENT | _without_settings(os.environ),
            start_new_session=True,  # Ctrl-C is handled by this process, which stops the workers
            pass_fds=(descriptor,),
        )
    finally:
        os.close(descriptor)
    assert process.stdin is not None
    data = msgspec.msgpack.encode(msgspec.structs.replace(config, journal=descriptor))
    process.stdin.write(len(data).to_bytes(4, "little") + data)
    return WorkerProcess(process, journal)


def _journal() -> tuple[mmap.mmap, int]:
    """Return the memory of a journal and its file descriptor. All of it is allocated now, as it could be
    unavailable later."""
    descriptor = os.memfd_create("streamserve-journal", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, JOURNAL_BYTES)
        return mmap.mmap(descriptor, JOURNAL_BYTES), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the server's settings, which include keys: a worker gets its
    configuration on its standard input."""
    return {name: value for name, value in environment.items() if not name.startswith("STREAMSERVE_")}


def _status(code: int) -> str:
    """Return an exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
