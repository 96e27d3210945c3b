"""This process's fork server: a child that has imported what workers import, and starts programs by forking.

    launchers, LLM, … ── hold ──▶ ForkServer ── socket ──▶ workers/fork_server.py ── fork ──▶ programs

All launchers of a process share one fork server. It runs while any launcher holds it, and LINGER_SECONDS
longer for the next one. It is replaced if it has died, or if its children would differ from newly started
processes: in their surroundings (environment, limits, users, …), or in the files of their libraries.
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
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from streamserve.protocol.fork import (
    Fork,
    Forked,
    Imported,
    ProgramEnded,
    Reply,
    Request,
    Unable,
    Wait,
    receive,
    send,
)
from streamserve.system.forks import above_streams, identity, surroundings

logger = logging.getLogger(__name__)

IMPORT_SECONDS = 60.0
"""Limit for the imports, long enough for a machine with other load."""
ANSWER_SECONDS = 10.0
LINGER_SECONDS = 60.0
"""Seconds without a holder after which the fork server ends."""
LINGERING = "the fork server's end"
"""Name of the thread that waits for LINGER_SECONDS."""
MAX_PROCESSES = 2
"""Maximum number of fork servers with different surroundings: this server's environment, and a changed
one."""
RETRY_SECONDS = 30.0
"""Seconds after a failure during which programs are started without a fork server."""


class CannotFork(Exception):
    """A program cannot be forked now: start it as a new process."""


class ForkServer:
    """The fork server of this process, for as long as it is held."""

    def __init__(self) -> None:
        # Guards the attributes below; never held while waiting for a fork server.
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._holders = 0
        self._ending: threading.Timer | None = None
        self._processes: list[_Process] = []  # the process that forked most recently comes first
        self._failed_at = -math.inf

    def hold(self, environment: Mapping[str, str]) -> None:
        """Keep a fork server running, for programs with this environment, until `release`. Its imports begin
        at once; this call does not wait for them."""
        with self._lock:
            self._holders += 1
            if self._ending:
                self._ending.cancel()
            if not self._processes:
                with contextlib.suppress(CannotFork, OSError):
                    self._processes.append(_start(environment))

    def release(self) -> None:
        """End one hold. Without a holder, the fork server ends after `LINGER_SECONDS`."""
        # In a fork of this process, another thread's lock may never be released.
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._ending = threading.Timer(LINGER_SECONDS, self.end_unless_held)
                self._ending.name, self._ending.daemon = LINGERING, True
                with contextlib.suppress(RuntimeError):  # Python is exiting, which ends the fork server
                    self._ending.start()

    def end_unless_held(self) -> None:
        """End the fork server if no launcher holds it. Programs that it has forked continue."""
        with self._lock:
            if not self._holders:
                self._keep(0)

    @property
    def pid(self) -> int | None:
        """The id of the process that forked most recently; None if there is none."""
        return self._processes[0].popen.pid if self._processes else None

    def fork(self, request: Fork, streams: Sequence[int], descriptors: Sequence[int] = ()) -> "ForkedProcess":
        """Start a program with these standard streams: input, output and error. The request contains the
        numbers of the `descriptors` in the new program. Waits until the fork server has finished its imports.

        Raises CannotFork. Even then a process may have been forked: the caller must end it by closing its
        standard input.
        """
        try:
            process = self._fitting(request)
            with own_pidfd() as own:
                return process.fork(request, (*streams, own, *descriptors))
        except (CannotFork, OSError) as error:
            if os.getpid() == self._owner and self._holders:
                logger.warning("workers start more slowly: %s", error)
                self._failed_at = time.monotonic()
            raise CannotFork(str(error)) from error

    def _fitting(self, request: Fork) -> "_Process":
        """Return a fork server whose programs inherit this process's surroundings; start one if necessary.
        Raises CannotFork, OSError."""
        if os.getpid() != self._owner:
            raise CannotFork("this process was forked from the one that has a fork server")
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in request.environment.items()}
        current = surroundings(environment)
        with self._lock:
            if not self._holders:
                raise CannotFork("this process has no fork server")
            if time.monotonic() - self._failed_at < RETRY_SECONDS:
                raise CannotFork("the fork server failed a moment ago")
            process = next((process for process in self._processes if process.fits(current)), None)
            if process is None:
                self._keep(MAX_PROCESSES - 1)
                process = _start(environment)
            self._processes = [process, *(other for other in self._processes if other is not process)]
            return process

    def _keep(self, count: int) -> None:
        """Retire fork servers that have ended. Of the running ones, keep the `count` that forked most
        recently."""
        running = [process for process in self._processes if process.runs]
        for process in self._processes:
            if process not in running[:count]:
                process.retire()
        self._processes = running[:count]


@functools.cache
def fork_server() -> ForkServer:
    """Return this process's fork server."""
    return ForkServer()


# A fork of this process needs a separate fork server.
os.register_at_fork(after_in_child=fork_server.cache_clear)


class _Process:
    """A running fork server. Programs that it forks inherit `surroundings`. It runs until it is retired and
    none of its programs is watched any more: it alone knows their exit statuses."""

    def __init__(self, popen: subprocess.Popen[bytes], connection: socket.socket, inherited: object) -> None:
        self.popen = popen
        self._connection = connection
        self._inherited = inherited
        self._asking = threading.Lock()
        self._libraries: dict[str, tuple[int, ...]] | None = None
        self._lock = threading.Lock()  # guards the attributes below
        self._watched = 0
        self._retired = False

    @property
    def runs(self) -> bool:
        return self.popen.poll() is None

    def fits(self, inherited: object) -> bool:
        """Return whether the server runs, and whether its programs would equal newly started ones: same
        surroundings, and unchanged files of the loaded libraries."""
        libraries = self._libraries or {}
        return (
            self.runs
            and self._inherited == inherited
            and all(identity(Path(path)) == known for path, known in libraries.items())
        )

    def ask(self, request: Request, descriptors: tuple[int, ...] = ()) -> tuple[Reply, list[int]]:
        """Send a request, once the server has finished its imports; return the reply with its descriptors.
        Raises CannotFork, and kills a server that does not answer: a late reply would be taken for the next
        request's."""
        with self._asking:
            try:
                if self._libraries is None:
                    self._libraries = self._wait_for_imports()
                send(self._connection, request, descriptors)
                return self._receive()
            except (OSError, msgspec.DecodeError, CannotFork) as error:
                self.popen.kill()
                self.popen.wait()
                raise CannotFork(f"the fork server does not answer: {error}") from error

    def _wait_for_imports(self) -> dict[str, tuple[int, ...]]:
        """Return the native libraries that the server has loaded: path and identity of each file."""
        self._connection.settimeout(IMPORT_SECONDS)
        reply, _ = self._receive()
        if not isinstance(reply, Imported):
            raise CannotFork(f"unexpected reply {reply}")
        self._connection.settimeout(ANSWER_SECONDS)
        return reply.libraries

    def _receive(self) -> tuple[Reply, list[int]]:
        data, descriptors = receive(self._connection)
        if not data:
            raise CannotFork("it has ended")
        reply: Reply = msgspec.msgpack.decode(data, type=Reply)
        return reply, descriptors

    def fork(self, request: Fork, descriptors: tuple[int, ...]) -> "ForkedProcess":
        """Fork a program. Raises CannotFork."""
        reply, received = self.ask(request, descriptors)
        if isinstance(reply, Forked) and len(received) == 1:
            with self._lock:
                self._watched += 1
            return ForkedProcess(reply.pid, received[0], self)
        raise CannotFork(reply.reason if isinstance(reply, Unable) else f"unexpected reply {reply}")

    def forget(self) -> None:
        """Record that one program fewer is watched."""
        with self._lock:
            self._watched -= 1
            self._end_if_unused()

    def retire(self) -> None:
        """Accept no more requests to fork."""
        with self._lock:
            self._retired = True
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._retired and not self._watched:
            self.popen.kill()  # a thread that waits for its reply sees the connection end
            self.popen.wait()
            self._connection.close()


def _start(environment: Mapping[str, str]) -> _Process:
    """Start a fork server. Raises OSError, and CannotFork on systems without fork servers."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        raise CannotFork("fork servers need Linux")
    pair = socket.socketpair()
    here, there = map(above_streams, pair)
    with there:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "streamserve.workers.fork_server", str(os.getpid())],
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
        self._close = weakref.finalize(self, _forget, pidfd, server)

    def status(self) -> int | None:
        """Return the exit status once the program has ended: negative for the signal that ended it; None if
        unknown because its fork server has ended."""
        with contextlib.suppress(CannotFork):
            reply, _ = self._server.ask(Wait(self.pid))
            return reply.status if isinstance(reply, ProgramEnded) else None
        # After its fork server ended, the program may have become a child of this process.
        with contextlib.suppress(OSError):
            ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            if ended:
                return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return None

    def kill(self) -> None:
        """Kill the program, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching the program; idempotent."""
        self._close()


def _forget(pidfd: int, server: _Process) -> None:
    os.close(pidfd)
    server.forget()


@contextlib.contextmanager
def own_pidfd() -> Iterator[int]:
    """Yield a descriptor of this process: other processes see by it when this process ends. Raises
    OSError."""
    descriptor = os.pidfd_open(os.getpid())
    try:
        yield descriptor
    finally:
        os.close(descriptor)
