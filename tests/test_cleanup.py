"""A command or a script leaves no process, folder or shared memory, however and in whichever stage it ends.

A few cells of the matrix of programs, stages and signals by default, all with --full.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import Scale
from tests.processes import FORK_SERVER, WORKER, running_below

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
EXIT_SECONDS = 60.0

SCRIPT = """
    from streamserve import LLM, SamplingParams
    llm = LLM("embedded", threads=1, log_level="warning")
    print("ready", flush=True)
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    llm.generate([[5, 6, 7]] * 200, params, use_tqdm=False)
"""
COMMAND = ("-m", "streamserve")

PROGRAMS: dict[str, tuple[str, ...]] = {
    "serve": (*COMMAND, "serve", "embedded", "--threads", "1", "--port", "0"),
    "workers": (*COMMAND, "serve", "embedded", "--workers", "2", "--threads", "1", "--port", "0"),
    "script": ("-c", textwrap.dedent(SCRIPT)),
    "generate": (*COMMAND, "generate", "Count to ten thousand.", "--threads", "1", "--max-tokens", "1000"),
    "draft": (*COMMAND, "draft", "--threads", "1", "--listen", "tcp://127.0.0.1:0"),
}
"""Programs that run until they are stopped."""

STAGES = ("imports", "loading", "working")

CELLS = [(program, "working", number) for program in PROGRAMS for number in SIGNALS] + [
    (program, stage, number) for program in PROGRAMS for stage in STAGES[:2] for number in SIGNALS
]
DEFAULT = {
    ("serve", "working", signal.SIGHUP),
    ("serve", "imports", signal.SIGINT),
    ("workers", "working", signal.SIGKILL),
    ("script", "loading", signal.SIGKILL),
    ("script", "working", signal.SIGTERM),
    ("generate", "working", signal.SIGINT),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder for one program, short enough for sockets."""
    path = Path(f"/tmp/cleanup-{os.getpid()}-{time.monotonic_ns() % 10**9}")
    path.mkdir()
    yield path
    subprocess.run(["rm", "-r", str(path)], check=True)


def start(program: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *PROGRAMS[program], *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def has_torch(process: psutil.Process) -> bool:
    """Return whether a process has loaded PyTorch."""
    try:
        return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return False


def wait_for_stage(process: subprocess.Popen[str], stage: str) -> list[psutil.Process]:
    """Wait for a stage of a program; return the program's workers in that stage."""
    program_process = psutil.Process(process.pid)
    if stage == "imports":  # One of the command's first imports is loaded, and the last one is not.
        wait_for(lambda: "msgspec" in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8"))
        return []
    if stage == "loading":  # The fork server, which imports the same libraries, starts before its workers.
        wait_for(lambda: any(map(has_torch, running_below(process.pid, WORKER))))
        return program_process.children(recursive=True)
    wait_for(program_process.children)
    workers = program_process.children(recursive=True)
    assert process.stdout is not None
    printed = ""
    while not any(word in printed for word in ("ready", "  Use it")) and len(printed) < 4000:
        piece = process.stdout.read(1)
        assert piece, process.stderr.read() if process.stderr else ""
        printed += piece
        if "generate" in " ".join(program_process.cmdline()):
            break  # The program prints only its answer.
    return workers


def shared_memory() -> set[str]:
    """Return the names in the system's shared memory; a container may have none."""
    return {file.name for file in Path("/dev/shm").glob("*")}


@pytest.mark.parametrize(
    ("program", "stage", "number"), CELLS, ids=lambda value: getattr(value, "name", str(value))
)
def test_nothing_is_left(
    scale: Scale, folder: Path, program: str, stage: str, number: signal.Signals
) -> None:
    if not scale.full and (program, stage, number) not in DEFAULT:
        pytest.skip("with --full")
    before = shared_memory()
    process = start(program, folder)
    try:
        workers = wait_for_stage(process, stage)
        process.send_signal(number)
        _, errors = process.communicate(timeout=EXIT_SECONDS)
        wait_for(lambda: not any(worker.is_running() for worker in workers), EXIT_SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert [path.name for path in folder.glob("streamserve-*")] == []
    assert {name for name in shared_memory() - before if "pytest" not in name} == set()
    command = program != "script"  # A script may print its own traceback.
    if number == signal.SIGINT and command:
        assert process.returncode == (130 if program == "generate" or stage == "imports" else 0)
    assert "Task was destroyed" not in errors
    assert "never awaited" not in errors
    assert not (command and "Traceback" in errors), errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.03])
def test_nothing_is_left_by_a_start_without_a_fork_server(
    scale: Scale, folder: Path, number: signal.Signals, seconds: float
) -> None:
    """A start without a fork server leaves nothing, although no other process then removes the folder of a
    process that ends just after creating it."""
    if not scale.full and (number, seconds) != (signal.SIGTERM, 0.0):
        pytest.skip("with --full")
    process = start("serve", folder, "--no-fork-workers")
    try:
        wait_for(lambda: list(folder.glob("streamserve-*/lock")) or process.poll() is not None)
        time.sleep(seconds)
        process.send_signal(number)
        _, errors = process.communicate(timeout=EXIT_SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert [path.name for path in folder.glob("streamserve-*")] == []
    assert process.returncode in (0, 130, -number)
    assert "Traceback" not in errors


def test_a_fork_of_a_killed_script_does_not_keep_a_worker_running(scale: Scale, folder: Path) -> None:
    """A fork of a killed script does not keep a worker running. The fork inherits the script's end of the
    worker's pipe, and its lock, so the worker also checks its parent."""
    if not scale.full:
        pytest.skip("with --full")
    forking = """
        import os, sys, time
        from streamserve import LLM
        llm = LLM("embedded", threads=1, num_blocks=64, log_level="warning")
        if not os.fork():
            time.sleep(600)
        print(llm._llm._runtime.driver.launcher.control.folder, flush=True)
        time.sleep(600)
    """
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(forking)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(str(folder))
    workers = running_below(process.pid, WORKER, FORK_SERVER)
    (fork,) = set(psutil.Process(process.pid).children()) - set(workers)
    process.kill()
    process.wait()
    try:
        wait_for(lambda: not any(worker.is_running() for worker in workers), EXIT_SECONDS)
        assert fork.is_running()
    finally:
        fork.kill()
        process.stdout.close()
