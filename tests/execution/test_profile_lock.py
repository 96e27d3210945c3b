"""Only one process measures at a time, and what others compute meanwhile is noticed."""

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from streamserve.execution.profile.lock import LOCK, Others, Usage, alone

MEASURING = """
import sys, time
from pathlib import Path
from streamserve.execution.profile.lock import alone
with alone(Path(sys.argv[1]), 60.0) as had:
    began = time.monotonic()
    time.sleep(0.2)
    print(had, began, time.monotonic())
"""


def test_processes_that_measure_at_once_never_overlap(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURING, str(tmp_path / "profiles")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = sorted(process.communicate(timeout=60)[0].split() for process in running)
    assert [had for had, _, _ in found] == ["True"] * 3
    spans = sorted((float(began), float(ended)) for _, began, ended in found)
    for (_, ended), (began, _) in pairwise(spans):
        assert ended <= began


def test_the_wait_is_bounded_and_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURING.replace("time.sleep(0.2)", "print(1, flush=True); input()")]
    holder = subprocess.Popen([*command, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        started = time.monotonic()
        with alone(tmp_path, 0.2) as had:
            assert not had
        assert time.monotonic() - started >= 0.2
    finally:
        holder.kill()
        holder.communicate()
    with alone(tmp_path, 20.0) as had:
        assert had
    assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600


def test_where_nothing_can_be_written_nobody_waits(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with alone(tmp_path / "file" / "profiles", 60.0) as had:
        assert not had


@pytest.mark.parametrize(
    ("machine", "own", "disturb"), [(2.0, 2.0, False), (2.2, 2.0, False), (3.0, 2.0, True)]
)
def test_what_others_compute_on_our_cores_disturbs(machine: float, own: float, disturb: bool) -> None:
    """All cores are ours; in a second others use none, a little, or a whole one."""
    usages = iter([Usage(10.0, 5.0, 1.0), Usage(11.0, 5.0 + machine, 1.0 + own)])
    assert Others(2, lambda: next(usages), cores=2).disturb == disturb


def test_what_others_compute_on_cores_that_are_left_to_them_does_not() -> None:
    usages = iter([Usage(10.0, 5.0, 1.0), Usage(11.0, 9.0, 2.0)])
    assert not Others(1, lambda: next(usages), cores=4).disturb


def test_this_machine_tells_what_it_does() -> None:
    others = Others(1)
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        pass
    assert others.disturb in (True, False)
