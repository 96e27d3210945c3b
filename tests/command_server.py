"""Start `streamserve` commands in milliseconds: a process that has imported them forks one for each command.

`python -m streamserve` imports for 0.3 to 0.9 s of processor time before it does anything, and tests start
hundreds. A forked command has its own arguments, environment, folder and standard streams, runs as the main
thread of an interpreter that ends as usual, and is a child of the forking process. The fork server of its
workers is forked too, by a process that has imported what workers import. Tests of how commands start and
end use plain processes: `subprocess` with `PLAIN`.
"""

import atexit
import contextlib
import gc
import hashlib
import importlib
import io
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, cast

from setproctitle import getproctitle, setproctitle
from typer.main import get_command

from streamserve.fleet import fork_server
from streamserve.fleet.worker_process import worker_environment
from streamserve.system.forks import surroundings
from tests import ending

PLAIN = (sys.executable, "-m", "streamserve")
MAX_MESSAGE = 1 << 20
_STARTING = threading.Lock()
Kind = Literal["commands", "torch", "workers"]
"""The kind of a forking process, by its imports: the commands; also torch; or the imports of workers."""


class Command:
    """A running command, with the interface of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = False,
        env: Mapping[str, str] | None = None,
        kind: Kind = "commands",
    ) -> None:
        """Start `streamserve` with `arguments` as a fork of a process of this `kind`."""
        self.args = list(arguments)
        self.returncode: int | None = None
        self._state, childs_state = socket.socketpair()
        closing: list[int] = []
        streams: list[IO[Any] | None] = []
        descriptors: list[int] = []
        for number, stream in enumerate((stdin, stdout, stderr)):
            descriptor, own = _redirected(number, stream, text, closing)
            descriptors.append(descriptors[1] if stream == subprocess.STDOUT else descriptor)
            streams.append(own)
        self.stdin, self.stdout, self.stderr = streams
        environment = dict(os.environ if env is None else env)
        request = json.dumps([self.args, environment, os.getcwd(), _inherited(worker_environment())])
        control = _forking_process(kind)
        if kind != "workers":
            descriptors.append(_forking_process("workers").fileno())
        socket.send_fds(control, [request.encode()], [*descriptors, childs_state.fileno()])
        childs_state.close()
        for descriptor in closing:
            os.close(descriptor)
        self.pid = int(self._receive())

    def _receive(self) -> bytes:
        message = self._state.recv(16)
        assert message, "the process that forks commands has ended"
        return message

    def poll(self) -> int | None:
        """Return the exit status if the command has ended."""
        if self.returncode is None:
            self._state.setblocking(False)
            try:
                self.returncode = int(self._receive())
            except BlockingIOError:
                return None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the command to end; return its exit status, negative for the signal that ended it."""
        if self.returncode is None:
            self._state.settimeout(timeout)
            try:
                self.returncode = int(self._receive())
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Send `input`, read both outputs to their ends, and wait."""
        deadline = None if timeout is None else time.monotonic() + timeout
        outputs: dict[int, Any] = {}
        readers = [
            threading.Thread(target=lambda n=n, s=s: outputs.update({n: s.read()}), daemon=True)
            for n, s in enumerate((self.stdout, self.stderr))
            if s is not None
        ]
        for reader in readers:
            reader.start()
        if self.stdin is not None:
            if input:
                self.stdin.write(input)
            self.stdin.close()
        self.wait(timeout)
        for reader in readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return outputs.get(0), outputs.get(1)


def run(
    arguments: Sequence[str], *, input: str | None = None, timeout: float = 120.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run` does with `capture_output` and `text`."""
    pipe = subprocess.PIPE
    stdin = subprocess.DEVNULL if input is None else pipe
    command = Command(arguments, stdin=stdin, stdout=pipe, stderr=pipe, text=True, **options)
    try:
        output, errors = command.communicate(input, timeout)
    except BaseException:
        command.kill()
        raise
    return subprocess.CompletedProcess(command.args, command.wait(), output, errors)


def close_all() -> None:
    """End the forking processes that this process started."""
    with _STARTING:
        for process, control in _FORKING.values():
            control.close()
            if process:
                process.wait()
        _FORKING.clear()


ROOT = Path(__file__).parents[1]
"""The folder in which forking processes start, since the test that needs the first one may have changed the
working folder."""
_FORKING: dict[Kind, tuple[subprocess.Popen[bytes] | None, socket.socket]] = {}
"""The forking processes that this process started; in a command, the inherited one of its workers."""
atexit.register(close_all)
ending.CALLS.append(close_all)


def _redirected(
    number: int, stream: int | IO[Any] | None, text: bool, closing: list[int]
) -> tuple[int, IO[Any] | None]:
    """Return the descriptor for the standard stream `number` of a command, and the other end if it is a
    pipe."""
    if stream is None or stream == subprocess.STDOUT:
        return number, None
    if stream == subprocess.DEVNULL:
        closing.append(os.open(os.devnull, os.O_RDWR))
        return closing[-1], None
    if stream != subprocess.PIPE:
        return stream if isinstance(stream, int) else stream.fileno(), None
    reading, writing = os.pipe()
    theirs, ours = (reading, writing) if number == 0 else (writing, reading)
    closing.append(theirs)
    return theirs, open(ours, ("w" if number == 0 else "r") + ("" if text else "b"))


def _forking_process(kind: Kind) -> socket.socket:
    """Return the socket of the forking process of this kind, which starts when it is first needed."""
    with _STARTING:
        if kind not in _FORKING:
            own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE)
            command = [
                sys.executable, "-m", "tests.command_server", str(theirs.fileno()), "streamserve", kind,
            ]  # fmt: skip
            environment = worker_environment() if kind == "workers" else None
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, cwd=ROOT
            )
            theirs.close()
            _FORKING[kind] = process, own
        return _FORKING[kind][1]


def _inherited(environment: Mapping[str, str]) -> str:
    """Return a name for everything that workers with this environment inherit from this process."""
    return hashlib.blake2b(repr(surroundings(environment)).encode(), digest_size=16).hexdigest()


def _fork_workers(inherited: str, started: Callable[..., Any], environment: Mapping[str, str]) -> Any:
    """Start a fork server for a command's workers. It is forked from the process that has imported what
    workers import, or started as usual if the workers would then inherit something else."""
    if _inherited(environment) != inherited:
        return started(environment)
    here, there = socket.socketpair()
    with there:
        own = str(os.getpid())
        streams: dict[str, Any] = {"stdin": there.fileno(), "stdout": subprocess.DEVNULL}
        command = Command([own], env=environment, kind="workers", **streams)
    return fork_server._Process(cast("subprocess.Popen[bytes]", command), here, surroundings(environment))


def _fork_commands(control: socket.socket) -> tuple[list[str], dict[str, str], str, str] | None:
    """Fork a process for each request. Returns None at the end; in a forked process, returns the command to
    run."""
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != control.fileno():
                    pid, state = running.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with state:
                        _tell(state, status)
                    continue
                message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, 5)
                if not message:
                    return None
                state = socket.socket(fileno=descriptors.pop())
                pid = os.fork()
                if not pid:
                    for other, (_, held) in running.items():
                        os.close(other)
                        held.close()
                    state.close()
                    control.close()
                    if len(descriptors) > 3:
                        _FORKING["workers"] = None, socket.socket(fileno=descriptors.pop())
                    for number, descriptor in enumerate(descriptors):
                        os.dup2(descriptor, number)
                        os.close(descriptor)
                    arguments, environment, folder, inherited = json.loads(message)
                    return arguments, environment, folder, inherited
                for descriptor in descriptors:
                    os.close(descriptor)
                ended = os.pidfd_open(pid)
                running[ended] = pid, state
                selector.register(ended, selectors.EVENT_READ)
                _tell(state, pid)


def _tell(state: socket.socket, number: int) -> None:
    """Send a number, even if its reader may have ended."""
    with contextlib.suppress(OSError):
        state.send(b"%16d" % number)


def _become(arguments: list[str], environment: dict[str, str], folder: str, inherited: str) -> None:
    """Set this process up like a newly started one."""
    fork_server._start = partial(_fork_workers, inherited, fork_server._start)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    random.seed()
    reading, *writing = (io.FileIO(number, mode, closefd=False) for number, mode in enumerate("rww"))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(reading), encoding="utf-8")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(file), encoding="utf-8", line_buffering=file.isatty() or file.fileno() == 2
        )
        for file in writing
    )
    main = importlib.import_module("streamserve.__main__")
    sys.modules["__main__"].__package__ = "streamserve"  # the program's name in messages
    sys.argv = [main.__file__ or "", *arguments]


def serve() -> None:
    """Import, and fork commands until the socket is closed; each forked process runs one command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the commands
    control, kind = socket.socket(fileno=int(sys.argv[1])), sys.argv[3]
    if kind == "workers":
        _serve_workers(control)
        return
    importlib.import_module("streamserve.cli.run_server")
    importlib.import_module("streamserve.cli.run_draft_service")
    importlib.import_module("streamserve.extras.cluster.run_worker")
    importlib.import_module("streamserve.llm.llm")
    if kind == "torch":
        importlib.import_module("torch")
    get_command(importlib.import_module("streamserve.cli.main").app)  # imports the modules that build it
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    request = _fork_commands(control)
    if request is not None:
        _become(*request)
        importlib.import_module("streamserve.__main__").main()


def _serve_workers(control: socket.socket) -> None:
    """Import what workers import, and become a fork server for each command, in a forked process."""
    program = importlib.import_module("streamserve.workers.fork_server")
    getproctitle()  # finds its memory while the environment is unchanged
    program.preload()
    gc.collect()
    gc.freeze()
    request = _fork_commands(control)
    if request is not None:
        (command,), environment, folder, _ = request
        _become([], environment, folder, "")
        setproctitle(f"{sys.executable} -P -m streamserve.workers.fork_server for {command}")
        sys.exit(program.main(os.getppid()))


if __name__ == "__main__":
    serve()
