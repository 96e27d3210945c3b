"""Workers forked by the fork server equal started workers, and continue when the fork server dies or no
longer fits."""

import asyncio
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import uvloop

from streamserve import LLM
from streamserve.fleet.child_process import ForkedChild, start_program
from streamserve.fleet.fork_server import ForkServer
from streamserve.fleet.worker_process import prepared_fork_server, worker_environment
from streamserve.protocol import fork
from streamserve.protocol.sampling import SamplingParams
from streamserve.system import forks
from streamserve.workers import fork_server as program
from tests.checkpoints import make_checkpoint
from tests.processes import words, workers_below

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
STATUS = ("Umask", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn", "SigCgt", "CapEff")
"""Lines of /proc/PID/status that a forked worker must have in common with a started one."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("forked"))


@contextmanager
def used(server: ForkServer) -> Iterator[None]:
    """Let `server` fork the workers."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("worker_process", "child_process"):
            patch.setattr(f"streamserve.fleet.{module}.fork_server", lambda: server)
        with prepared_fork_server():
            yield
    server.end_unless_held()


@pytest.fixture(scope="module")
def own_server() -> Iterator[ForkServer]:
    """A fork server for these tests only."""
    with used(server := ForkServer()):
        yield server


def text(llm: LLM) -> list[int]:
    (output,) = llm.generate([[5, 6, 7, 8]], GREEDY)
    return output.outputs[0].token_ids


def worker_of(llm: LLM) -> psutil.Process:
    return psutil.Process(llm._llm._runtime.process_id("unified-0"))


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def facts(process: psutil.Process) -> dict[str, object]:
    """Return the properties of a worker that lists of processes, files and signals show."""
    folder = Path(f"/proc/{process.pid}")
    lines = (line.partition(":") for line in (folder / "status").read_text().splitlines())
    status = {name: value.strip() for name, _, value in lines if name in STATUS}
    targets = [os.readlink(file) for file in (folder / "fd").iterdir()]
    return {
        **status,
        "limits": (folder / "limits").read_text(),
        "command": " ".join(process.cmdline()).strip().rstrip("123456789"),
        "name": (folder / "comm").read_text(),
        "folder": process.cwd(),
        "leads its session": os.getsid(process.pid) == process.pid,
        "nice": process.nice(),
        "memory files": sorted(target for target in targets if target.startswith("/memfd:")),
        "sockets": sum(target.startswith("socket:") for target in targets),
        "pipes": sum(target.startswith("pipe:") for target in targets),
        "threads": process.num_threads(),
    }


def test_a_forked_worker_is_like_a_started_one(checkpoint: Path, own_server: ForkServer) -> None:
    with LLM(str(checkpoint)) as forked, LLM(str(checkpoint), fork_workers=False) as started:
        assert worker_of(forked).ppid() == own_server.pid
        assert worker_of(started).ppid() == os.getpid()
        assert text(forked) == text(started)
        assert facts(worker_of(forked)) == facts(worker_of(started))


def test_the_fork_server_has_one_thread_and_computes_nothing(
    checkpoint: Path, own_server: ForkServer
) -> None:
    with LLM(str(checkpoint), threads=2) as llm:
        assert len(text(llm)) == 8
        assert worker_of(llm).ppid() == own_server.pid
        assert own_server.pid is not None
        assert psutil.Process(own_server.pid).num_threads() == 1


def test_a_killed_worker_is_forked_again(
    checkpoint: Path, own_server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(checkpoint)) as llm:
        expected, first = text(llm), worker_of(llm)
        first.kill()
        until(lambda: llm._llm._runtime.fleet.incidents().deaths == 1)
        assert "SIGKILL" in caplog.text
        until(lambda: llm._llm.health().ready)
        assert text(llm) == expected
        assert worker_of(llm).pid != first.pid
        assert worker_of(llm).ppid() == own_server.pid


def test_workers_outlive_their_fork_server_and_the_next_one_is_forked_by_another(
    checkpoint: Path, own_server: ForkServer
) -> None:
    with LLM(str(checkpoint)) as llm:
        expected, dead = text(llm), own_server.pid
        assert dead is not None
        os.kill(dead, signal.SIGKILL)
        assert text(llm) == expected
        with LLM(str(checkpoint)) as other:
            assert text(other) == expected
            assert worker_of(other).ppid() == own_server.pid != dead
        worker_of(llm).kill()
        until(lambda: llm._llm._runtime.fleet.incidents().deaths == 1)
        until(lambda: llm._llm.health().ready)
        assert text(llm) == expected


def test_a_worker_with_another_environment_has_a_fork_server_of_its_own(
    checkpoint: Path,
    own_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LLM(str(checkpoint)) as llm:
        before = own_server.pid
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        with LLM(str(checkpoint)):
            assert own_server.pid != before
        assert text(llm)
        with LLM(str(checkpoint)) as third, monkeypatch.context() as patch:
            other = own_server.pid
            patch.delenv("OMP_NUM_THREADS")
            with LLM(str(checkpoint)):
                assert own_server.pid == before, "the first fork server is kept"
            assert other != before
            assert text(third)
        worker_of(llm).kill()  # The fork server still reports how the worker ended.
        until(lambda: llm._llm._runtime.fleet.incidents().deaths == 1)
        assert "SIGKILL" in caplog.text


def test_a_forked_worker_has_the_folder_and_processors_of_its_parent(
    checkpoint: Path, own_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    processors = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(processors)})
        with LLM(str(checkpoint), threads=len(processors) + 1) as llm:  # too many threads to be pinned
            assert worker_of(llm).cwd() == str(tmp_path)
            assert os.sched_getaffinity(worker_of(llm).pid) == {max(processors)}
    finally:
        os.sched_setaffinity(0, processors)


def test_all_models_are_forked_by_one_server(checkpoint: Path, own_server: ForkServer) -> None:
    for _ in range(3):
        with LLM(str(checkpoint), backend="native") as llm:
            parents = worker_of(llm).ppid(), own_server.pid
        assert parents[0] == parents[1] == own_server.pid


def test_a_library_is_another_one_once_it_was_replaced(tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    library.write_bytes(b"1")
    known = forks.identity(library)
    os.utime(library, (1, 1))
    assert forks.identity(library) == known
    (tmp_path / "new").write_bytes(b"2")
    (tmp_path / "new").replace(library)
    assert forks.identity(library) != known
    library.unlink()
    assert forks.identity(library) == ()


def test_without_pidfds_workers_are_started(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused)
    with used(ForkServer()), LLM(str(checkpoint)) as llm:
        assert worker_of(llm).ppid() == os.getpid()
        assert len(text(llm)) == 8


def test_forked_processes_have_random_numbers_of_their_own() -> None:
    code = """
import os, random, socket, sys
import numpy
from streamserve.protocol.fork import Fork
from streamserve.workers.fork_server import become

for _ in range(2):
    if os.fork() == 0:
        processors = tuple(os.sched_getaffinity(0))
        request = Fork("worker", ("a",), ("x", "a"), {b"A": b"1"}, os.getcwdb(), 0o022, processors)
        become(request, [os.dup(0), os.dup(1), os.dup(2), os.pidfd_open(os.getppid())])
        assert sys.argv[0].endswith("workers/__main__.py")
        assert sys.argv[1:] == ["a"]
        print(random.random(), numpy.random.random(), os.urandom(4).hex(), flush=True)
        os._exit(0)
    os.wait()
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    first, second = (line.split() for line in printed.splitlines())
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_fork_server_ends_after_its_last_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamserve.fleet.fork_server.LINGER_SECONDS", 0.2)
    server = ForkServer()
    environment = dict(os.environ)
    server.hold(environment)
    server.hold(environment)
    process = psutil.Process(server.pid)
    server.release()
    time.sleep(0.3)
    assert process.is_running()
    server.release()
    until(lambda: server.pid is None)
    assert not process.is_running()


def test_a_fork_server_ends_with_its_process() -> None:
    code = """
import os, time
from streamserve.fleet.fork_server import fork_server
fork_server().hold(dict(os.environ))
print(fork_server().pid, flush=True)
"""
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    until(lambda: not psutil.pid_exists(int(started.stdout)))


def test_only_what_is_imported_late_may_differ() -> None:
    environment = {"PATH": "/bin", "TMPDIR": "/a"}
    assert forks.surroundings(environment) == forks.surroundings({**environment, "TMPDIR": "/b"})
    assert forks.surroundings(environment) != forks.surroundings({**environment, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    "change",
    [
        "prctl(39, 0, 0, 0, 0) and sys.exit(1); prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))",
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        "unshare(0x10000000) and sys.exit(1)  # CLONE_NEWUSER",
    ],
)
def test_what_a_process_gives_up_its_forked_workers_must_not_have(change: str) -> None:
    code = f"""
import ctypes, resource, signal, sys
from streamserve.system.forks import surroundings
prctl, unshare = ctypes.CDLL(None).prctl, ctypes.CDLL(None).unshare
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
before = surroundings({{}})
assert surroundings({{}}) == before
{change}
assert surroundings({{}}) != before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 1 and not done.stderr:
        pytest.skip("this is so already here, or not permitted")
    assert done.returncode == 0, done.stderr


def test_a_fork_server_that_is_stopped_costs_a_status_and_not_the_worker(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("streamserve.fleet.fork_server.ANSWER_SECONDS", 0.5)
    with used(server := ForkServer()), LLM(str(checkpoint)) as llm:
        expected, stopped = text(llm), server.pid
        assert stopped is not None
        assert worker_of(llm).ppid() == stopped
        os.kill(stopped, signal.SIGSTOP)
        worker_of(llm).kill()
        until(lambda: llm._llm._runtime.fleet.incidents().deaths == 1)
        assert "an unknown status" in caplog.text
        until(lambda: llm._llm.health().ready)
        assert text(llm) == expected
        assert worker_of(llm).ppid() == server.pid != stopped
        assert not psutil.pid_exists(stopped) or psutil.Process(stopped).status() == psutil.STATUS_ZOMBIE


def test_any_bytes_may_be_in_the_environment(
    checkpoint: Path, own_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODD", os.fsdecode(b"a\xff"))
    with LLM(str(checkpoint)) as llm:
        assert len(text(llm)) == 8
        assert worker_of(llm).ppid() == own_server.pid


def test_a_start_that_is_given_up_leaves_no_process(own_server: ForkServer) -> None:
    async def give_up(seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            start = start_program("worker", "given-up", worker_environment())
            child = await asyncio.wait_for(start, seconds)
            child.kill()
            await child.wait()

    def running() -> list[psutil.Process]:
        return [worker for worker in workers_below(os.getpid()) if words(worker)[-1] == "given-up"]

    before = len(os.listdir("/proc/self/fd"))
    for number in range(12):
        asyncio.run(give_up(number * 0.001))
    until(lambda: not running())
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_the_input_of_a_program_is_closed_once(
    own_server: ForkServer, monkeypatch: pytest.MonkeyPatch, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    """The input of a program is closed once: after a second close of the same number, another thread's file
    could be closed."""
    open_before: list[bool] = []

    class Pipe(io.FileIO):
        def close(self) -> None:
            if not self.closed:
                open_before.append(Path(f"/proc/self/fd/{self.fileno()}").exists())
            super().close()

    async def start_and_end() -> None:
        child = await start_program("worker", "ended", worker_environment())
        assert isinstance(child, ForkedChild)
        child.close_input()
        await child.wait()

    monkeypatch.setattr(os, "fdopen", lambda descriptor, mode, **_: Pipe(descriptor, mode))
    run(start_and_end())
    assert open_before == [True]


def test_a_fork_of_the_process_has_a_fork_server_of_its_own(checkpoint: Path) -> None:
    code = """
import os, sys, time
from streamserve import LLM
from streamserve.fleet.fork_server import fork_server

def answered():
    with LLM(sys.argv[1], log_level="error") as llm:
        llm.generate([[5, 6, 7]], use_tqdm=False)
        return fork_server().pid

first = answered()
if not (child := os.fork()):
    assert answered() not in (None, first)
    fork_server().end_unless_held()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert answered() == first
"""
    command = [sys.executable, "-c", code, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_process_with_several_threads_is_not_forked() -> None:
    here, there = socket.socketpair()
    with here, there:
        thread = threading.Thread(target=program.serve, args=(there, os.getppid()))
        thread.start()
        request = fork.Fork("worker", (), (), {}, os.getcwdb(), 0o022, (0,))
        fork.send(here, request, (0, 1, 2, 0))
        reply, descriptors = fork.receive(here)
        here.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert "threads" in msgspec.msgpack.decode(reply, type=fork.Unable).reason
    assert not descriptors
