"""Only one process measures at a time, and disturbance by other processes is detected."""

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from streamserve.execution.profile.lock import LOCK, BackgroundLoad, ProcessorUsage, exclusive_measurement

MEASURING = """
import sys, time
from pathlib import Path
from streamserve.execution.profile.lock import exclusive_measurement
with exclusive_measurement(Path(sys.argv[1]), 60.0) as exclusive:
    began = time.monotonic()
    time.sleep(0.2)
    print(exclusive, began, time.monotonic())
"""


def test_processes_that_measure_at_once_never_overlap(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURING, str(tmp_path / "profiles")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lines = sorted(process.communicate(timeout=60)[0].split() for process in running)
    assert [exclusive for exclusive, _, _ in lines] == ["True"] * 3
    spans = sorted((float(began), float(ended)) for _, began, ended in lines)
    for (_, ended), (began, _) in pairwise(spans):
        assert ended <= began


def test_the_wait_is_bounded_and_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURING.replace("time.sleep(0.2)", "print(1, flush=True); input()")]
    holder = subprocess.Popen([*command, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        started = time.monotonic()
        with exclusive_measurement(tmp_path, 0.2) as exclusive:
            assert not exclusive
        assert time.monotonic() - started >= 0.2
    finally:
        holder.kill()
        holder.communicate()
    with exclusive_measurement(tmp_path, 20.0) as exclusive:
        assert exclusive
    assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600


def test_where_nothing_can_be_written_nothing_waits(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with exclusive_measurement(tmp_path / "file" / "profiles", 60.0) as exclusive:
        assert not exclusive


@pytest.mark.parametrize(
    ("machine", "own", "disturbs"), [(2.0, 2.0, False), (2.2, 2.0, False), (3.0, 2.0, True)]
)
def test_background_load_on_our_cores_disturbs(machine: float, own: float, disturbs: bool) -> None:
    """Background load on our cores disturbs a measurement. All cores are ours; within a second other
    processes use none, a little, or a whole core."""
    usages = iter([ProcessorUsage(10.0, 5.0, 1.0), ProcessorUsage(11.0, 5.0 + machine, 1.0 + own)])
    assert BackgroundLoad(2, lambda: next(usages), cores=2).disturbs == disturbs


def test_background_load_on_other_cores_does_not() -> None:
    usages = iter([ProcessorUsage(10.0, 5.0, 1.0), ProcessorUsage(11.0, 9.0, 2.0)])
    assert not BackgroundLoad(1, lambda: next(usages), cores=4).disturbs


def test_background_load_is_readable_on_this_machine() -> None:
    load = BackgroundLoad(1)
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        pass
    assert load.disturbs in (True, False)
