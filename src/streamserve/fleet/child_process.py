"""Child processes that run a program of this package: forked by the fork server, or started.

start_program ── fork server held, no GPU ──▶ ForkedChild    has torch and the kernels already
              └─ otherwise ─────────────────▶ StartedChild   imports them first
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from streamserve.fleet.fork_server import CannotFork, ForkedProcess, fork_server
from streamserve.protocol.fork import Fork, Program
from streamserve.system.forks import file_mode_mask

logger = logging.getLogger(__name__)

MODULES: dict[Program, str] = {
    "worker": "streamserve.workers",
    "memory_plan": "streamserve.workers.memory_plan",
}


class StartedChild:
    """A process that was started as a new program, not forked, and the pipe to its standard input."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, data: bytes) -> None:
        """Write to the program's standard input, unless it is closed."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(data)

    def close_input(self) -> None:
        """Close the program's standard input; idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def wait(self) -> int:
        """Wait for the end of the process. Return its exit status: negative for the signal that ended it."""
        return await self._process.wait()

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


class InputPipe:
    """The pipe to a program's standard input, written by the running event loop.

    Only this class closes the pipe's descriptor. A transport of uvloop would close it twice; between the two,
    a thread may open another file, which gets the same descriptor number and would then be closed.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        self._waiting = bytearray()
        self._closing = False

    def write(self, data: bytes) -> None:
        """Write data as soon as the pipe accepts it. Ignored if the pipe is closed."""
        if self._closing or not data:
            return
        if not self._waiting:
            self._loop.add_writer(self._pipe.fileno(), self._write)
        self._waiting += data

    def close(self) -> None:
        """Close the pipe once all data is written; idempotent."""
        self._closing = True
        if not self._waiting:
            self._pipe.close()

    def _write(self) -> None:
        try:
            del self._waiting[: self._pipe.write(self._waiting) or 0]
        except OSError:  # the reader has ended
            self._waiting.clear()
            self._closing = True
        if not self._waiting:
            self._loop.remove_writer(self._pipe.fileno())
            if self._closing:
                self._pipe.close()


class ForkedChild:
    """A process of the fork server, with the methods of StartedChild. Must be created in a running event
    loop."""

    def __init__(self, process: ForkedProcess, pipe: IO[bytes]) -> None:
        self._process = process
        self._stdin = InputPipe(pipe)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int | None] = self._loop.create_future()
        self._loop.add_reader(process.pidfd, self._end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, data: bytes) -> None:
        self._stdin.write(data)

    def close_input(self) -> None:
        self._stdin.close()

    async def wait(self) -> int | None:
        """Wait for the end of the process. Return its exit status as StartedChild does; None if unknown."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if not self._ended.done():
            self._process.kill()

    def _end(self) -> None:
        self._loop.remove_reader(self._process.pidfd)
        self._stdin.close()
        self._taking = self._loop.create_task(self._take_status())  # a reference: the loop holds tasks weakly

    async def _take_status(self) -> None:
        try:  # in a thread: a fork server that is stopped does not answer
            status = await self._loop.run_in_executor(None, self._process.status)
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            status = self._process.status()
        self._process.close()
        if not self._ended.done():
            self._ended.set_result(status)


ChildProcess = StartedChild | ForkedChild


def command_of(program: Program, title: str) -> tuple[str, ...]:
    """Return the command that starts a program. The title is only shown in lists of processes."""
    return sys.executable, "-P", "-m", MODULES[program], title


async def start_program(
    program: Program,
    title: str,
    environment: Mapping[str, str],
    descriptors: Sequence[int] = (),
    stdout: int = 1,
    fork: bool = True,
) -> ChildProcess:
    """Start a program in a new session. It inherits `descriptors`, and `stdout` is its standard output. If
    `fork`, it is forked where possible. Raises OSError."""
    if fork:
        try:
            return await _fork(program, title, environment, descriptors, stdout)
        except CannotFork as error:
            logger.debug("starting a new process: %s", error)
    process = await asyncio.create_subprocess_exec(
        *command_of(program, title),
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        env=dict(environment),
        start_new_session=True,  # Ctrl-C is handled by this process, which stops the workers
        pass_fds=tuple(descriptors),
    )
    return StartedChild(process)


async def _fork(
    program: Program, title: str, environment: Mapping[str, str], descriptors: Sequence[int], stdout: int
) -> ForkedChild:
    """Fork a program. Raises CannotFork; then no other process holds its standard input."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        try:
            request = _request(program, title, environment, descriptors)
            pipe, job = _forking(request, stdout, descriptors)
        except (OSError, ValueError) as error:
            raise CannotFork(str(error)) from error
        stack.callback(pipe.close)  # ends a process that is forked, or being forked
        stack.callback(job.give_up)
        forked = loop.run_in_executor(None, job.run)
        # Read the exception: asyncio would report it for a fork that was given up.
        forked.add_done_callback(lambda done: done.cancelled() or done.exception())
        child = ForkedChild(await asyncio.shield(forked), pipe)
        stack.pop_all()
    return child


def _request(
    program: Program, title: str, environment: Mapping[str, str], descriptors: Sequence[int]
) -> Fork:
    """Return the request for a program that inherits this thread's folder, file mode mask and processors.
    Raises OSError."""
    return Fork(
        program,
        (title,),
        command_of(program, title),
        {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
        os.fsencode(os.getcwd()),
        file_mode_mask(),
        tuple(os.sched_getaffinity(0)),
        tuple(descriptors),
    )


def _forking(request: Fork, stdout: int, descriptors: Sequence[int]) -> "tuple[IO[bytes], _Forking]":
    """Return the pipe to a program's standard input, and the job that forks it. Raises OSError."""
    with contextlib.ExitStack() as stack:
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        pipe = stack.enter_context(os.fdopen(writing, "wb", buffering=0))
        # The thread may outlive its caller: it gets copies of the descriptors, and closes them.
        copies = []
        for descriptor in (stdout, 2, *descriptors):
            copies.append(os.dup(descriptor))
            stack.callback(os.close, copies[-1])
        stack.pop_all()
    return pipe, _Forking(request, (reading, *copies))


class _Forking:
    """Forks one program in a thread, with descriptors that this object owns and closes. The caller may give
    up meanwhile."""

    def __init__(self, request: Fork, descriptors: tuple[int, ...]) -> None:
        self._request = request
        self._descriptors = descriptors
        self._lock = threading.Lock()
        self._process: ForkedProcess | None = None
        self._given_up = False

    def run(self) -> ForkedProcess:
        """Fork the program. Raises CannotFork."""
        try:
            process = fork_server().fork(self._request, self._descriptors[:3], self._descriptors[3:])
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)
        with self._lock:
            self._process = process
            if self._given_up:
                _end(process)
        return process

    def give_up(self) -> None:
        """End the program, even if it is forked later."""
        with self._lock:
            self._given_up = True
            if self._process:
                _end(self._process)


def _end(process: ForkedProcess) -> None:
    process.kill()
    process.close()
