"""A worker's process, and its journal: memory that both share, which outlives the process.

memfd ── inherited ──▶ worker writes what it is at (protocol/journal.py)
      ── mapped ─────▶ the server reads it: beats while it lives, suspects when it has died
"""

import asyncio
import contextlib
import mmap
import os
import signal
import sys
from collections.abc import Mapping

import msgspec

from streamserve.fleet.events import Beat, Lost
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.journal import JOURNAL_BYTES, Entry, read_journal

STOP_SECONDS = 10.0

WORKER_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Unless told otherwise a worker's idle threads sleep: spinning ones take the cores from whoever they wait
for, this process included, and made steps ten times slower on a machine that had other things to do."""


class WorkerProcess:
    """A process that was started, and its journal."""

    def __init__(self, process: asyncio.subprocess.Process, journal: mmap.mmap) -> None:
        self._process = process
        self._journal = journal

    @property
    def pid(self) -> int:
        return self._process.pid

    def beat(self) -> Beat | None:
        """Its last sign of life; None once it has ended."""
        if self._journal.closed:
            return None
        entry = read_journal(self._journal)
        return Beat(entry.beat_at, entry.phase, entry.moved_at, entry.predicted)

    async def lost(self, worker: str, incarnation: int) -> Lost:
        """Wait for its end, and tell what it was at."""
        code = await self._process.wait()
        entry = Entry() if self._journal.closed else read_journal(self._journal)
        self._journal.close()
        reason = entry.words or f"its process ended with {_status(code)}"
        return Lost(worker, incarnation, reason, entry.attempts, entry.phase, entry.report)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        """Wait for a process that was asked to leave; kill it if it does not."""
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
            start_new_session=True,  # Ctrl-C is for us; we tell the workers
            pass_fds=(descriptor,),
        )
    finally:
        os.close(descriptor)
    assert process.stdin is not None
    data = msgspec.msgpack.encode(msgspec.structs.replace(config, journal=descriptor))
    process.stdin.write(len(data).to_bytes(4, "little") + data)
    return WorkerProcess(process, journal)


def _journal() -> tuple[mmap.mmap, int]:
    """Memory for a journal, and a descriptor of it. All of it is taken now: later it could be missing."""
    descriptor = os.memfd_create("streamserve-journal", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, JOURNAL_BYTES)
        return mmap.mmap(descriptor, JOURNAL_BYTES), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """A worker is told all on its standard input; the server's settings, keys among them, are not for it."""
    return {name: value for name, value in environment.items() if not name.startswith("STREAMSERVE_")}


def _status(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
