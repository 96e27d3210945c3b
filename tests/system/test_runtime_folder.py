"""A runtime folder is removed with its owner, however the owner ends; folders of living owners and of other
users stay."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamserve.system.runtime_folder import (
    EMPTY_SECONDS,
    LOCK,
    MAX_BASE_BYTES,
    folder_of,
    make_runtime_folder,
    remove_if_dead,
    remove_own,
    socket_base,
    sweep,
)

OWNER = """
import sys
from pathlib import Path
from streamserve.system.runtime_folder import make_runtime_folder
folder = make_runtime_folder(Path(sys.argv[1]))
(folder.path / "control").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def test_a_process_that_ends_removes_its_own_folders_alone(owner, tmp_path):
    left, own = Path(owner.stdout.readline().strip()), make_runtime_folder(tmp_path)
    (own.path / "control").touch()
    remove_own()
    assert list(tmp_path.iterdir()) == [left]
    os.close(own.handle)


def test_the_next_start_removes_what_a_killed_owner_left(owner, tmp_path):
    left = Path(owner.stdout.readline().strip())
    assert sweep(tmp_path) == []
    assert (left / "control").exists(), "the owner of the folder lives"
    owner.send_signal(signal.SIGKILL)
    owner.wait(20)
    assert left.exists()
    own = make_runtime_folder(tmp_path)
    assert not left.exists()
    assert own.path.stat().st_mode & 0o077 == 0
    assert sweep(tmp_path) == [], "a process does not sweep its own folder"
    own.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_dead_owners_is_left_alone(tmp_path):
    results = tmp_path / "streamserve-results"
    results.mkdir()
    (results / "important").touch()
    (tmp_path / "streamserve-file").touch()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / LOCK).touch()
    (tmp_path / "streamserve-link").symlink_to(outside)
    linked = tmp_path / "streamserve-linked-lock"
    linked.mkdir()
    (linked / LOCK).symlink_to(outside / LOCK)
    young, old = tmp_path / "streamserve-young", tmp_path / "streamserve-old"
    young.mkdir()
    old.mkdir()
    past = time.time() - EMPTY_SECONDS - 10
    os.utime(old, (past, past))
    os.utime(results, (past, past))
    assert sweep(tmp_path) == [old]
    assert (results / "important").exists()
    assert (outside / LOCK).exists()
    assert young.exists()
    assert not remove_if_dead(tmp_path / "streamserve-nowhere")


def test_many_starts_at_once_take_nothing_from_each_other(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    folders = [Path(process.stdout.readline().strip()) for process in processes]
    assert all((folder / "control").exists() for folder in folders)
    for process in processes:
        process.communicate()
    assert sorted(sweep(tmp_path)) == sorted(folders)


def test_the_folder_of_an_endpoint():
    assert folder_of("ipc:///tmp/streamserve-abc/control") == Path("/tmp/streamserve-abc")
    assert folder_of("ipc:///tmp/elsewhere/control") is None
    assert folder_of("tcp://127.0.0.1:5000") is None


def test_a_temporary_folder_that_is_too_long_for_sockets_is_not_used(monkeypatch, tmp_path):
    short, long = Path("/tmp"), tmp_path / ("x" * MAX_BASE_BYTES)
    long.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert socket_base() == short
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert socket_base() == (tmp_path if len(str(tmp_path)) <= MAX_BASE_BYTES else short)
    folder = make_runtime_folder()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder.path / "control"))
    folder.remove()
