"""The fork server: a small process that has imported the modules of workers, and forks for each request.

    server process ── Fork, descriptors ──▶ fork server ── fork ──▶ worker (workers/__main__.py)
                   ◀── Forked, pidfd ──────            ◀─ status ──
                   ── Wait ──▶ ◀── Ended ──

Importing torch takes a second, forking a hundredth of a second. A process can be forked safely only while it
has one thread, so the fork server computes nothing, opens no ZeroMQ context, and refuses to fork once it has
more threads. It ends with the process that started it; the processes that it forked stay.
"""

import contextlib
import fcntl
import gc
import importlib
import logging
import os
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable

import msgspec
from setproctitle import getproctitle, setproctitle

from streamserve.protocol.fork import (
    OWN_DESCRIPTORS,
    Fork,
    Forked,
    Imported,
    ProgramEnded,
    Unable,
    Wait,
    receive,
    send,
)
from streamserve.system.forks import above_streams, identity
from streamserve.system.runtime_folder import socket_base, sweep

PARENT_SECONDS = 1.0
"""Seconds between checks whether the parent still runs: a fork of the parent may keep the socket open."""
logger = logging.getLogger(__name__)

FOLDER_SECONDS = 2.0
"""Seconds to wait for the end of a parent that may be dying."""


def main(parent: int) -> int:
    """Serve the process `parent` on the socket at standard input; return the exit status.

    In each forked process, run the requested program instead.
    """
    getproctitle()  # the library finds its memory now, while the environment is unchanged
    gc.disable()  # a collection in a forked process would copy all memory that it shares with this one
    connection = above_streams(socket.socket(fileno=os.dup(sys.stdin.fileno())))
    try:
        libraries = preload()
    except (ImportError, MemoryError, OSError):  # a worker that is started instead reports the reason
        return 1
    gc.freeze()
    forked = None
    with contextlib.suppress(OSError):  # the parent may have ended
        send(connection, Imported(libraries))
        forked = serve(connection, parent)
    if forked:
        connection.close()
        gc.enable()
        return become(*forked)()
    sweep_after(parent)
    return 0


def sweep_after(parent: int) -> None:
    """Remove the runtime folder of a `parent` that was killed before it had workers, which would remove
    it."""
    deadline = time.monotonic() + FOLDER_SECONDS
    while os.getppid() == parent:  # until its end the parent may hold the folder's lock
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    sweep(socket_base())


def preload() -> dict[str, tuple[int, ...]]:
    """Import the modules of the programs; return the identities of native libraries by their paths."""
    importlib.import_module("streamserve.workers.worker")
    importlib.import_module("streamserve.workers.draft_worker")
    importlib.import_module("streamserve.execution.loading.footprint")
    from streamserve.execution.backends.native.build import cached_library
    from streamserve.execution.backends.native.library import kernels
    from streamserve.execution.backends.native.packaged import packaged_library

    try:
        library = packaged_library() or cached_library()
        if library and kernels():
            return {str(library): identity(library)}
    except Exception as error:  # a worker reports what this means for it
        logger.debug("kernels are not loaded in advance: %s", error)
    return {}


def serve(connection: socket.socket, parent: int) -> tuple[Fork, list[int]] | None:
    """Answer requests until the process `parent`, at the other end of `connection`, ends.

    In a forked process, return its request and descriptors. Raises OSError.
    """
    while True:
        ready, _, _ = select.select([connection], [], [], PARENT_SECONDS)
        if not ready and os.getppid() == parent:
            continue
        data, descriptors = receive(connection) if ready else (b"", [])
        if not data:
            return None
        request = msgspec.msgpack.decode(data, type=Fork | Wait)
        if isinstance(request, Wait):
            send(connection, ProgramEnded(exit_status(request.pid)))
            continue
        try:
            if not (pid := fork()):
                return request, descriptors
        except OSError as error:
            send(connection, Unable(str(error)))
        else:
            pidfd = os.pidfd_open(pid)
            send(connection, Forked(pid), (pidfd,))
            os.close(pidfd)
        for descriptor in descriptors:
            os.close(descriptor)


def fork() -> int:
    """Fork; return the new process's id, and 0 in that process. Raises OSError if forking fails or is
    unsafe."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise OSError(f"the fork server has {threads} threads")
    return os.fork()


def exit_status(pid: int) -> int | None:
    """Return the exit status of a forked process; None if it has not ended or is unknown."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended else None


def become(request: Fork, descriptors: list[int]) -> Callable[[], int]:
    """Give a forked process the state of a started one; return its program."""
    os.setsid()
    parent = place(descriptors, request.descriptors)
    os.environ.clear()
    os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in request.environment.items()})
    os.umask(request.umask)
    if not in_folder(request.folder):
        os.chdir(request.folder)
    os.sched_setaffinity(0, request.processors)
    setproctitle(" ".join(request.command))
    sys.orig_argv[:] = request.command
    tempfile.tempdir = None  # determined again, in this environment
    import numpy

    numpy.random.seed()  # the random module seeds itself after a fork
    alive = select.poll()
    alive.register(parent, select.POLLIN)
    from streamserve.workers import __main__, memory_plan

    def plan_memory() -> int:
        memory_plan.main()
        return 0

    module = __main__ if request.program == "worker" else memory_plan
    sys.argv[:] = [str(module.__file__), *request.arguments]
    return plan_memory if module is memory_plan else lambda: __main__.run_worker(lambda: not alive.poll(0))


def in_folder(folder: bytes) -> bool:
    """Return whether this process already is in `folder`, which it may not be allowed to enter."""
    try:
        return os.fsencode(os.getcwd()) == folder
    except OSError:
        return False


def place(descriptors: list[int], numbers: tuple[int, ...]) -> int:
    """Give the received descriptors the numbers that the program expects; return the pidfd of the requesting
    process.

    The first three get the numbers of the standard streams, 0 to 2. The ones after the pidfd get `numbers`,
    the numbers that a program started without forking would inherit.
    """
    wanted, spare = {0, 1, 2, *numbers}, []
    moved: list[int] = []
    for descriptor in descriptors:  # move all away from the wanted numbers first
        while (copy := fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)) in wanted:
            spare.append(copy)
        moved.append(copy)
    for descriptor in (*spare, *(set(descriptors) - wanted)):
        os.close(descriptor)
    streams, (parent,), others = moved[:3], moved[3:OWN_DESCRIPTORS], moved[OWN_DESCRIPTORS:]
    for descriptor, number in zip((*streams, *others), (0, 1, 2, *numbers), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return parent


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
