"""Count the processors that this process may use: its affinity mask, within the CPU quota of its control
groups.

When a quota is used up, the kernel stops all threads of the process at once. With more threads than the quota
pays for, each step waits for a thread that was stopped.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Processors:
    """The processors in `cpus`: one of each core, then their siblings. `quota` limits how many can run at the
    same time; None: no limit. `nodes`: the NUMA node of each processor in `cpus`; empty if there is only one
    node."""

    cpus: tuple[int, ...]
    quota: float | None = None
    nodes: tuple[int, ...] = ()

    @property
    def threads(self) -> int:
        """The number of threads that can run at the same time."""
        return len(self.cpus) if self.quota is None else min(len(self.cpus), max(1, int(self.quota)))

    def by_node(self) -> list[tuple[int, ...]]:
        """Return the processors of each NUMA node."""
        if not self.nodes:
            return [self.cpus]
        placed = list(zip(self.cpus, self.nodes, strict=True))
        return [tuple(cpu for cpu, at in placed if at == node) for node in sorted(set(self.nodes))]

    def __str__(self) -> str:
        plural = "" if len(self.cpus) == 1 else "s"
        spread = f" of {len(self.by_node())} NUMA nodes" if self.nodes else ""
        limited = "" if self.quota is None else f", a CPU quota of {round(self.quota, 2):g}"
        return f"{len(self.cpus)} processor{plural}{spread}{limited}"


def usable_processors(root: Path = Path("/")) -> Processors:
    """Return the processors that this process may use. `root` is the folder that contains /proc and /sys."""
    cpus = _cores_first(sorted(os.sched_getaffinity(0)), root)
    quotas = [quota for quota in _quotas(root) if quota < len(cpus)]
    nodes = tuple(_node(cpu, root) for cpu in cpus)
    return Processors(cpus, min(quotas, default=None), nodes if len(set(nodes)) > 1 else ())


def _node(cpu: int, root: Path) -> int:
    """Return the NUMA node of a processor; 0 if the system does not say."""
    links = (root / f"sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")
    return min((int(link.name.removeprefix("node")) for link in links), default=0)


def _cores_first(cpus: list[int], root: Path) -> tuple[int, ...]:
    """Return `cpus` ordered so that one processor of each core comes first, then their siblings."""
    rank: dict[int, int] = {}
    seen: dict[str, int] = {}
    for cpu in cpus:
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        core = _text(file) or str(cpu)
        rank[cpu] = seen[core] = seen.get(core, -1) + 1
    return tuple(sorted(cpus, key=lambda cpu: (rank[cpu], cpu)))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas of this process's control groups, in processors: of versions 1 and 2, from its group
    up to the mount."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if not separator or (controllers and "cpu" not in controllers.split(",")):
            continue
        # Version 1 is mounted under its controllers' names, maybe in another order; "cpu" is then a link to
        # the mount.
        for name in {"cpu", controllers} if controllers else {""}:
            mount = root / "sys/fs/cgroup" / name
            group = mount / path.lstrip("/")
            groups = [group, *group.parents]
            quotas = map(_quota, groups[: groups.index(mount) + 1])
            yield from (quota for quota in quotas if quota is not None)


def _quota(group: Path) -> float | None:
    """Return the quota of a control group in processors: `cpu.max` of version 2, two files of version 1. None
    without one."""
    quota, _, period = _text(group / "cpu.max").partition(" ")
    try:
        if not quota:
            quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        processors = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # no such group, or no limit ("max")
    return processors if processors > 0 else None  # version 1: -1 is no limit


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
