"""Entry point of a worker process: reads the configuration, watches the parent, runs the role."""

import contextlib
import faulthandler
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.lease import Lease
from streamserve.system.available_memory import address_limit
from streamserve.system.logs import configure_logging
from streamserve.system.runtime_folder import folder_of, remove_if_dead

MAX_CONFIG_BYTES = 1 << 20
PARENT_SECONDS = 1.0
"""Seconds between checks whether the parent still runs, in addition to watching its end of the pipe."""
LEASE_SECONDS = 0.05
"""Seconds between checks whether the lease is over."""
LEASE_EXIT_STATUS = 75
FOLDER_SECONDS = 2.0
"""Seconds to wait for the lock of a parent that may be dying."""


def read_config(stream: BinaryIO) -> WorkerConfig | None:
    """Return the configuration: four bytes of length (little endian), then msgpack. Return None if the stream
    ends before it is complete.

    Raises ValueError if it is malformed.
    """
    length = _read(stream, 4)
    size = int.from_bytes(length, "little")
    if len(length) < 4:
        return None
    if not 0 < size <= MAX_CONFIG_BYTES:
        raise ValueError(f"standard input must hold a worker configuration, but its length is {size}")
    content = _read(stream, size)
    return msgspec.msgpack.decode(content, type=WorkerConfig) if len(content) == size else None


def _read(stream: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, fewer at the end of an unbuffered stream."""
    data = b""
    while len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data


def exit_with_parent(
    descriptor: int, parent_lives: Callable[[], bool], folder: Path | None, lease: Lease | None = None
) -> None:
    """End this process when its parent has ended in any way or closes its end of the pipe.

    A fork of the parent may keep the pipe open, so `parent_lives` is checked too. First removes the parent's
    runtime `folder`, if the parent is dead. When the `lease` is over, which the parent extends through the
    pipe, the process ends at once.
    """
    seconds = LEASE_SECONDS if lease else PARENT_SECONDS
    while parent_lives():
        ready, _, _ = select.select([descriptor], [], [], seconds)
        # An unbuffered read: the lock of a buffered one would block an orderly exit.
        data = os.read(descriptor, 4096) if ready else None
        if data == b"":
            break
        if lease:
            lease.read(data or b"")
            # Since its last look at the pipe, this thread may have waited for the interpreter for as long as
            # an import takes, and the parent may have extended the lease.
            if lease.is_over(time.monotonic()) and not select.select([descriptor], [], [], 0)[0]:
                os._exit(LEASE_EXIT_STATUS)
    # A dying process closes its files one after another: it may hold its lock a moment longer than the pipe.
    deadline = time.monotonic() + FOLDER_SECONDS
    while folder and folder.exists() and time.monotonic() < deadline and not remove_if_dead(folder):
        time.sleep(0.01)
    os._exit(1)


def name_process(worker: str) -> None:
    """Name this process after its role and index, for `top` and `ps -o comm` (on Linux, 15 characters)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(worker[:15], encoding="utf-8")


def main() -> int:
    """Run the worker that standard input describes; return the exit status."""
    parent = os.getppid()
    return run_worker(lambda: os.getppid() == parent)


def run_worker(parent_lives: Callable[[], bool]) -> int:
    """Run the worker that standard input describes while its parent lives; return the exit status."""
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stream:  # later bytes stay in the pipe
        config = read_config(stream)
    if config is None:
        if parent_lives():
            print("standard input ended before the worker's configuration was complete", file=sys.stderr)
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging(config.log_level, config.log_format, config.worker)
    name_process(config.worker)
    lease = Lease() if config.leased else None
    arguments = (sys.stdin.fileno(), parent_lives, folder_of(config.endpoint), lease)
    threading.Thread(target=exit_with_parent, args=arguments, daemon=True).start()
    faulthandler.enable()  # a fault in native code leaves a traceback in the log
    gc.disable()  # imports make many objects and no garbage: collections would take a seventh of their time
    if config.role == "draft":  # imports torch, which takes a while
        from streamserve.workers.draft_worker import run as run_draft

        gc.enable()
        return run_draft(config)
    from streamserve.workers.journal import open_journal

    journal = open_journal(config.journal)
    journal.keep_beating()
    try:
        from streamserve.workers.worker import run  # imports torch, which takes a while
    except (ImportError, MemoryError, OSError) as error:
        journal.say(f"its libraries cannot be loaded: {error}{_address_text()}", "")
        return 1

    gc.enable()
    return run(config, journal)


def _address_text() -> str:
    limit = address_limit()
    return "" if limit is None else f" (ulimit -v allows {limit >> 20} MiB of addresses: raise it)"


if __name__ == "__main__":
    sys.exit(main())
