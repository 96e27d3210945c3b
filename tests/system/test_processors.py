"""The number of processors that a process may use is detected."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from streamserve.system.processors import Processors, usable_processors

CPUS = sorted(os.sched_getaffinity(0))
V1 = "3:cpuset:/\n1:cpu,cpuacct:/outer/inner\n"
V2 = "0::/outer/inner\n"
FIND = "from streamserve.system.processors import usable_processors; found = usable_processors()"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def version_1(quota: int, folder: str = "outer/inner", mount: str = "cpu,cpuacct") -> dict[str, str]:
    group = f"sys/fs/cgroup/{mount}/{folder}"
    return {f"{group}/cpu.cfs_quota_us": f"{quota}\n", f"{group}/cpu.cfs_period_us": "100000\n"}


def version_2(quota: str, folder: str = "outer/inner") -> dict[str, str]:
    return {f"sys/fs/cgroup/{folder}/cpu.max": f"{quota} 100000\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": V2} | version_2("max"), None),
        ({"proc/self/cgroup": V2} | version_2("50000"), 0.5),
        ({"proc/self/cgroup": V2} | version_2("max") | version_2("25000", "outer"), 0.25),
        ({"proc/self/cgroup": V2} | version_2("50000", "."), 0.5),
        ({"proc/self/cgroup": V1} | version_1(-1), None),
        ({"proc/self/cgroup": V1} | version_1(50000), 0.5),
        ({"proc/self/cgroup": V1} | version_1(75000, "."), 0.75),
        ({"proc/self/cgroup": V1} | version_1(10**9), None),
        ({"proc/self/cgroup": V2} | version_2("nonsense"), None),
        ({"proc/self/cgroup": "nonsense\n:\n" + V2} | version_2("50000"), 0.5),
        ({"proc/self/cgroup": V1.replace("cpu,cpuacct", "cpuacct,cpu")} | version_1(50000, mount="cpu"), 0.5),
    ],
    ids=[
        "no groups", "no limit", "own group", "group above", "a container's own tree", "version 1: no limit",
        "version 1", "version 1 in a container", "more than there are", "nonsense",
        "malformed lines", "version 1, other order",
    ],
)  # fmt: skip
def test_the_least_quota_of_all_control_groups_counts(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    write(tmp_path, files)
    assert usable_processors(tmp_path) == Processors(tuple(CPUS), quota)


@pytest.mark.parametrize(("quota", "threads"), [(None, 4), (0.5, 1), (1.0, 1), (1.9, 1), (2.0, 2), (9.0, 4)])
def test_no_more_threads_than_the_quota_pays_for(quota: float | None, threads: int) -> None:
    assert Processors((0, 1, 2, 3), quota).threads == threads


def test_one_processor_of_each_core_comes_first(tmp_path: Path) -> None:
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    write(tmp_path, {siblings.format(cpu): "all of one core" for cpu in CPUS})
    assert usable_processors(tmp_path).cpus == tuple(CPUS)
    if len(CPUS) > 1:
        write(tmp_path, {siblings.format(CPUS[-1]): "another core"})
        assert usable_processors(tmp_path).cpus[:2] == (CPUS[0], CPUS[-1])


def test_processors_of_several_numa_nodes_are_told_apart(tmp_path: Path) -> None:
    node = "sys/devices/system/cpu/cpu{}/node{}/cpulist"
    write(tmp_path, {node.format(cpu, 3): "" for cpu in CPUS})
    assert usable_processors(tmp_path).by_node() == [tuple(CPUS)]
    assert usable_processors(tmp_path).nodes == ()
    found = Processors((0, 2, 1, 3), nodes=(0, 1, 0, 1))
    assert found.by_node() == [(0, 1), (2, 3)]
    if len(CPUS) > 1:
        (tmp_path / node.format(CPUS[-1], 3)).unlink()
        (tmp_path / node.format(CPUS[-1], 3)).parent.rmdir()
        assert usable_processors(tmp_path).by_node() == [(CPUS[-1],), tuple(CPUS[:-1])]


def test_what_was_found_is_said() -> None:
    assert str(Processors((0,))) == "1 processor"
    assert str(Processors((0, 1), 0.5)) == "2 processors, a CPU quota of 0.5"
    assert str(Processors(tuple(range(200)), 112.5)) == "200 processors, a CPU quota of 112.5"
    both = Processors((0, 1, 2, 3), 2.0, (0, 0, 1, 1))
    assert str(both) == "4 processors of 2 NUMA nodes, a CPU quota of 2"


def test_a_process_in_a_control_group_finds_its_quota() -> None:
    with cpu_group(50_000) as join:
        code = f"{FIND}; print(found.quota, found.threads)"
        done = subprocess.run([sys.executable, "-c", code], preexec_fn=join, capture_output=True, text=True)
    assert done.stdout.split() == ["0.5", "1"], done.stderr


def test_a_process_on_one_processor_finds_it() -> None:
    code = f"{FIND}; print(found.threads)"
    pin = lambda: os.sched_setaffinity(0, CPUS[-1:])  # noqa: E731
    done = subprocess.run([sys.executable, "-c", code], preexec_fn=pin, capture_output=True, text=True)
    assert done.stdout.split() == ["1"], done.stderr


@contextmanager
def cpu_group(quota: int) -> Iterator[Callable[[], None]]:
    """Create a control group with this quota, in microseconds of 100,000; yield a function with which a
    process joins it."""
    made = _make_group(quota)
    if made is None:
        pytest.skip("this user may not make control groups for CPU time")
    try:
        yield partial(_join, made)
    finally:
        made.rmdir()


def _make_group(quota: int) -> Path | None:
    root = Path("/sys/fs/cgroup")
    for parent, limit, text in (
        (root / "cpu", "cpu.cfs_quota_us", f"{quota}"),
        (root, "cpu.max", f"{quota} 100000"),
    ):
        try:
            group = Path(tempfile.mkdtemp(prefix="streamserve-test-", dir=parent))
        except OSError:
            continue
        try:
            (group / limit).write_text(text)
            return group
        except OSError:
            group.rmdir()
    return None


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
