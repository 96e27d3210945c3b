"""This process's fork server: a child that has imported what workers import, and starts programs by forking.

    launchers, LLM, … ── hold ──▶ ForkServer ── socket ──▶ workers/fork_server.py ── fork ──▶ programs

All launchers of a process share one. It runs as long as one of them holds it, and a while longer for the
next one. A process that died is replaced, and so is one whose children would not be what new processes are.
"""

import contextlib
import functools
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from streamserve.protocol.fork import (
    Ended,
    Fork,
    Forked,
    Imported,
    Reply,
    Request,
    Unable,
    Wait,
    identity,
    receive,
    send,
    surroundings,
)

logger = logging.getLogger(__name__)

IMPORT_SECONDS = 60.0
"""Limit for the imports, on a machine with other load."""
ANSWER_SECONDS = 10.0
LINGER_SECONDS = 60.0
"""Time without a holder after which it ends."""
MAX_PROCESSES = 2
"""Fork servers for different surroundings: those of the server itself, and changed ones."""
RETRY_SECONDS = 30.0
"""After a failure, programs are started without a fork server for this time."""


class CannotFork(Exception):
    """A program cannot be forked now: start it as a new process."""


class ForkServer:
    """The fork server of this process, for as long as it is held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._holders = 0
        self._processes: list[_Process] = []  # the one that forked last comes first
        self._failed_at = -math.inf

    def hold(self, environment: Mapping[str, str]) -> None:
        """Keep a fork server running, for programs with this environment, until `release`. It begins to
        import at once, and this call does not wait for it."""
        with self._lock:
            self._holders += 1
            if not self._processes:
                with contextlib.suppress(CannotFork, OSError):
                    self._processes.append(_start(environment))

    def release(self) -> None:
        """Hold it no longer: without a holder it ends after `LINGER_SECONDS`."""
        with self._lock:
            self._holders -= 1
            if not self._holders:
                timer = threading.Timer(LINGER_SECONDS, self.end_unless_held)
                timer.daemon = True
                timer.start()

    def end_unless_held(self) -> None:
        """End the fork server if nothing holds it. What it has forked goes on."""
        with self._lock:
            if not self._holders:
                self._keep(0)

    @property
    def pid(self) -> int | None:
        """The id of the process that forked last; None if there is none."""
        return self._processes[0].popen.pid if self._processes else None

    def fork(self, request: Fork, streams: Sequence[int], descriptors: Sequence[int] = ()) -> "ForkedProcess":
        """Start a program with these standard streams: input, output and error. The request has the numbers
        of the `descriptors` in it. Waits until the fork server has finished its imports.

        Raises CannotFork.
        """
        with self._lock:
            if os.getpid() != self._owner or not self._holders:
                raise CannotFork("this process has no fork server")
            if time.monotonic() - self._failed_at < RETRY_SECONDS:
                raise CannotFork("the fork server failed a moment ago")
            try:
                with own_pidfd() as own:
                    return self._fork(request, (*streams, own, *descriptors))
            except (CannotFork, OSError) as error:
                logger.warning("workers start more slowly: %s", error)
                self._failed_at = time.monotonic()
                self._keep(0)
                raise CannotFork(str(error)) from error

    def _fork(self, request: Fork, descriptors: tuple[int, ...]) -> "ForkedProcess":
        """Fork, with a new fork server if the present one has ended or does not fit. Raises CannotFork,
        OSError."""
        current = surroundings(request.environment)
        for process in [process for process in self._processes if process.fits(current)]:
            self._processes.remove(process)
            self._processes.insert(0, process)
            try:
                return process.fork(request, descriptors)
            except CannotFork as error:  # it may have ended since
                logger.info("starting another fork server: %s", error)
        self._keep(MAX_PROCESSES - 1)
        self._processes.insert(0, _start(request.environment))
        return self._processes[0].fork(request, descriptors)

    def _keep(self, count: int) -> None:
        """Retire those that have ended, and those that forked longest ago beyond this number."""
        running = [process for process in self._processes if process.popen.poll() is None]
        for process in self._processes:
            if process not in running[:count]:
                process.retire()
        self._processes = running[:count]


@functools.cache
def fork_server() -> ForkServer:
    """Return this process's fork server."""
    return ForkServer()


class _Process:
    """A running fork server. Programs that it forks inherit `surroundings`. It runs until it is retired and
    the programs that it forked are not watched any more: it alone knows their exit statuses."""

    def __init__(self, popen: subprocess.Popen[bytes], connection: socket.socket, inherited: object) -> None:
        self.popen = popen
        self._connection = connection
        self._inherited = inherited
        self._lock = threading.RLock()
        self._libraries: dict[str, tuple[int, ...]] | None = None
        self._watched = 0
        self._retired = False

    def fits(self, inherited: object) -> bool:
        """Return whether it runs, and forks what a new process would be."""
        libraries = self._libraries or {}
        return (
            self.popen.poll() is None
            and self._inherited == inherited
            and all(identity(Path(path)) == known for path, known in libraries.items())
        )

    def ask(self, request: Request, descriptors: tuple[int, ...] = ()) -> tuple[Reply, list[int]]:
        """Send a request, once the server has finished its imports; return the reply with its descriptors.
        Raises CannotFork."""
        with self._lock:
            try:
                if self._libraries is None:
                    self._libraries = self._wait_for_imports()
                send(self._connection, request, descriptors)
                return self._receive()
            except (OSError, msgspec.DecodeError) as error:
                raise CannotFork(f"the fork server does not answer: {error}") from error

    def _wait_for_imports(self) -> dict[str, tuple[int, ...]]:
        """Return the native libraries that it has loaded, by path, with the identities of the files."""
        self._connection.settimeout(IMPORT_SECONDS)
        reply, _ = self._receive()
        if not isinstance(reply, Imported):
            raise CannotFork(f"unexpected reply {reply}")
        self._connection.settimeout(ANSWER_SECONDS)
        return reply.libraries

    def _receive(self) -> tuple[Reply, list[int]]:
        data, descriptors = receive(self._connection)
        if not data:
            raise CannotFork("the fork server has ended")
        reply: Reply = msgspec.msgpack.decode(data, type=Reply)
        return reply, descriptors

    def fork(self, request: Fork, descriptors: tuple[int, ...]) -> "ForkedProcess":
        """Fork a program. Raises CannotFork."""
        reply, received = self.ask(request, descriptors)
        if isinstance(reply, Forked) and len(received) == 1:
            with self._lock:
                self._watched += 1
            return ForkedProcess(reply.pid, received[0], self)
        for descriptor in received:
            os.close(descriptor)
        raise CannotFork(reply.reason if isinstance(reply, Unable) else f"unexpected reply {reply}")

    def forget(self) -> None:
        """One program less is watched."""
        with self._lock:
            self._watched -= 1
            self._end_if_unused()

    def retire(self) -> None:
        """Fork nothing more."""
        with self._lock:
            self._retired = True
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._retired and not self._watched:
            self._connection.close()
            self.popen.kill()
            self.popen.wait()


def _start(environment: Mapping[str, str]) -> _Process:
    """Start a fork server. Raises OSError, CannotFork where that is not possible at all."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        raise CannotFork("fork servers need Linux")
    here, there = socket.socketpair()
    with there:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "streamserve.workers.fork_server"],
            stdin=there.fileno(),
            stdout=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,
        )
    return _Process(popen, here, surroundings(environment))


class ForkedProcess:
    """A program forked by `server`, watched through its `pidfd`."""

    def __init__(self, pid: int, pidfd: int, server: _Process) -> None:
        self.pid, self.pidfd = pid, pidfd
        self._server = server

    def status(self) -> int | None:
        """Return the exit status once it has ended; negative: the signal that ended it; None: unknown,
        because its fork server has ended."""
        with contextlib.suppress(CannotFork):
            reply, _ = self._server.ask(Wait(self.pid))
            return reply.status if isinstance(reply, Ended) else None
        with contextlib.suppress(OSError):  # an orphan may have become a child of this process
            ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            if ended:
                return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return None

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Watch it no longer."""
        os.close(self.pidfd)
        self._server.forget()


@contextlib.contextmanager
def own_pidfd() -> Iterator[int]:
    """Open a descriptor of this process, which shows other processes when it ends. Raises OSError."""
    descriptor = os.pidfd_open(os.getpid())
    try:
        yield descriptor
    finally:
        os.close(descriptor)
