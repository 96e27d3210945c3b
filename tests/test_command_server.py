"""A forked command behaves like a started one: outputs, exit status, signals, environment, and its end."""

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.command_server import PLAIN, Command, run
from tests.processes import FORK_SERVER, running_below, workers_below


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--version"], 0), (["serve", "--help"], 0), (["serve", "--no-such-flag"], 2), (["serve", "none"], 2)],
)
def test_outputs_and_exit_status_are_those_of_a_started_command(arguments: list[str], status: int) -> None:
    forked = run(arguments)
    started = subprocess.run([*PLAIN, *arguments], capture_output=True, text=True, check=False)
    assert forked.returncode == started.returncode == status
    assert (forked.stdout, forked.stderr) == (started.stdout, started.stderr)
    assert forked.stdout + forked.stderr


def test_a_command_has_its_own_environment_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "STREAMSERVE_PORT": "1234"}
    assert "port = 1234\n" in run(["serve", "embedded", "--print-config"], env=environment).stdout
    assert "port = 1234\n" not in run(["serve", "embedded", "--print-config"]).stdout
    assert run(["keys", "new", "own.key"]).returncode == 0
    assert (tmp_path / "own.key").exists()


def test_a_command_ends_by_signals_and_leaves_no_process() -> None:
    command = Command(
        ["serve", "embedded", "--port", "0", "--threads", "1"], stdout=subprocess.PIPE, text=True
    )
    with pytest.raises(subprocess.TimeoutExpired):
        command.wait(0.01)
    assert command.poll() is None
    while "ready" not in command.stdout.readline():
        pass
    process = psutil.Process(command.pid)
    assert process.num_threads() > 1
    command.send_signal(signal.SIGINT)
    assert command.wait(20) == 0
    assert not process.is_running()
    killed = Command(["serve", "embedded", "--port", "0"], stdout=subprocess.DEVNULL)
    killed.kill()
    assert killed.wait(20) == killed.poll() == -signal.SIGKILL


def test_input_is_sent_and_torch_may_be_there_already(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    done = run(["models", "list"], env=environment, kind="torch", input="\n")
    assert done.returncode == 0
    assert json.dumps(done.stdout + done.stderr).count("no model is in the cache") == 1


def test_a_commands_workers_are_forked_by_its_own_fork_server() -> None:
    command = Command(
        ["serve", "embedded", "--port", "0", "--threads", "1"], stdout=subprocess.PIPE, text=True
    )
    while "ready" not in command.stdout.readline():
        pass
    (server,), (worker,) = running_below(command.pid, FORK_SERVER), workers_below(command.pid)
    assert worker.ppid() == server.pid
    assert server.ppid() != command.pid
    os.kill(command.pid, signal.SIGKILL)
    assert command.wait(20) == -signal.SIGKILL
    assert not psutil.wait_procs([server, worker], 20)[1]
