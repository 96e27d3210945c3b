"""Child processes that run a program of this package: forked by the fork server, or started.

start_program ── fork server held, no GPU ──▶ ForkedChild    ready to load a model after 0.03 s
              └─ otherwise ─────────────────▶ StartedChild   after importing torch
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from streamserve.fleet.fork_server import CannotFork, ForkedProcess, fork_server
from streamserve.protocol.fork import Fork, Program, file_mode_mask

logger = logging.getLogger(__name__)

MODULES: dict[Program, str] = {
    "worker": "streamserve.workers",
    "memory_plan": "streamserve.workers.memory_plan",
}


class ChildProcess(Protocol):
    """A running program and the pipe to its standard input."""

    @property
    def pid(self) -> int: ...

    def write(self, data: bytes) -> None:
        """Write to its standard input, unless that is closed."""
        ...

    def close_input(self) -> None:
        """Close its standard input; idempotent."""
        ...

    async def wait(self) -> int | None:
        """Wait for its end; return its exit status; negative: the signal that ended it; None: unknown."""
        ...

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        ...


class StartedChild:
    """A process that was started as usual."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, data: bytes) -> None:
        stdin = self._process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(data)

    def close_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


class ForkedChild:
    """A process of the fork server. Made in a running event loop."""

    def __init__(self, process: ForkedProcess, stdin: asyncio.WriteTransport) -> None:
        self._process = process
        self._stdin = stdin
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int | None] = self._loop.create_future()
        self._loop.add_reader(process.pidfd, self._end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, data: bytes) -> None:
        if not self._stdin.is_closing():
            self._stdin.write(data)

    def close_input(self) -> None:
        self._stdin.close()

    async def wait(self) -> int | None:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if not self._ended.done():
            self._process.kill()

    def _end(self) -> None:
        self._loop.remove_reader(self._process.pidfd)
        self._stdin.close()
        status = self._process.status()
        self._process.close()
        if not self._ended.done():
            self._ended.set_result(status)


def command_of(program: Program, title: str) -> tuple[str, ...]:
    """Return the command that starts a program. The title is for lists of processes: no program reads it."""
    return sys.executable, "-P", "-m", MODULES[program], title


async def start_program(
    program: Program,
    title: str,
    environment: Mapping[str, str],
    descriptors: Sequence[int] = (),
    stdout: int = 1,
    fork: bool = True,
) -> ChildProcess:
    """Start a program in a session of its own, which inherits `descriptors`, with `stdout` as its standard
    output. With `fork`, it is forked where that is possible. Raises OSError."""
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
    """Fork a program. Raises CannotFork, OSError."""
    request = Fork(
        program,
        (title,),
        command_of(program, title),
        dict(environment),
        os.getcwd(),
        file_mode_mask(),
        tuple(os.sched_getaffinity(0)),
        tuple(descriptors),
    )
    reading, writing = os.pipe()
    pipe = os.fdopen(writing, "wb", buffering=0)
    # The thread may outlive this call: it closes descriptors of its own.
    streams = [reading, os.dup(stdout), os.dup(2)]
    inherited = [os.dup(descriptor) for descriptor in descriptors]

    def fork() -> ForkedProcess:
        try:
            return fork_server().fork(request, streams, inherited)
        finally:
            for descriptor in (*streams, *inherited):
                os.close(descriptor)

    loop = asyncio.get_running_loop()
    forked = loop.run_in_executor(None, fork)
    try:
        process = await asyncio.shield(forked)
    except BaseException:
        pipe.close()  # ends a process that is being forked
        forked.add_done_callback(_forget)
        raise
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, pipe)
    return ForkedChild(process, transport)


def _forget(forked: "asyncio.Future[ForkedProcess]") -> None:
    """Close a process that was forked after its starter gave up."""
    if not forked.cancelled() and not forked.exception():
        forked.result().close()
