"""The results of campaigns: one small JSON file per family, with a hash of the files that its trials depend
on.

A trial counts while these files stay the same. When they change, earlier trials become totals; the seeds that
failed are stored, so that they are replayed first.
"""

import json
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tests.campaigns.outcome import KINDS, Outcome

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "tests" / "results" / "campaigns"
MAX_FAILURES = 20
"""Maximum number of failures that are stored in full; others are only counted."""
MAX_DETAIL = 600


class Failure(msgspec.Struct, kw_only=True):
    """A trial that failed: replay it with `--only-seed`."""

    seed: int
    kind: str
    detail: str
    settings: dict[str, Any] = {}


class Entry(msgspec.Struct, kw_only=True):
    """The trials that count, on one or several machines. `seeds` are ranges, both ends included."""

    machine: str = ""
    seeds: list[tuple[int, int]] = []
    trials: int = 0
    refused: int = 0
    seconds: float = 0.0
    failed: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    counts: dict[str, int] = {}
    worst: dict[str, float] = {}
    figures: dict[str, Any] = {}
    failures: list[Failure] = []

    def add(self, seed: int, outcome: Outcome, seconds: float) -> None:
        """Count one trial, once for its seed."""
        first = not contains(self.seeds, seed)
        self.seeds = merged([*self.seeds, (seed, seed)])
        self.trials += first
        self.seconds = round(self.seconds + seconds, 2)
        self.refused += first and outcome.verdict == "refused"
        for name, count in outcome.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for name, value in outcome.worst.items():
            self.worst[name] = max(self.worst.get(name, value), value)
        self.failures = [failure for failure in self.failures if failure.seed != seed]
        if outcome.verdict == "failed":
            self.failed[outcome.kind] = self.failed.get(outcome.kind, 0) + 1
            if len(self.failures) < MAX_FAILURES:
                detail = outcome.detail[-MAX_DETAIL:]
                failure = Failure(seed=seed, kind=outcome.kind, detail=detail, settings=outcome.settings)
                self.failures.append(failure)


class Totals(msgspec.Struct, kw_only=True):
    """The sum of the trials of earlier contents. The seeds in `failing` failed when they were last run."""

    commits: int = 0
    trials: int = 0
    refused: int = 0
    seconds: float = 0.0
    failed: dict[str, int] = {}
    last_seed: int = -1
    failing: list[int] = []


class Ledger(msgspec.Struct, kw_only=True):
    """The results file of one family.

    `content` is the hash of the files that its trials depend on; it is empty in files of versions that
    counted by commit. `commit` was checked out when the last trial ran.
    """

    family: str
    content: str = ""
    commit: str = ""
    now: Entry = msgspec.field(default_factory=Entry)
    earlier: Totals = msgspec.field(default_factory=Totals)

    def at(self, content: str, commit: str) -> Entry:
        """Return the entry of `content`. An entry of another content is added to the totals."""
        if content != self.content:
            if self.now.trials:
                self._archive()
            self.content, self.now = content, Entry()
        machines = self.now.machine.split("; ") if self.now.machine else []
        self.now.machine = "; ".join(dict.fromkeys([*machines, machine()]))
        self.commit = commit
        return self.now

    def next_seed(self) -> int:
        """Return the first seed above all that were ever run."""
        return max([self.earlier.last_seed, *(last for _, last in self.now.seeds)], default=-1) + 1

    def to_replay(self) -> list[int]:
        """Return the seeds that failed earlier and have not been run since."""
        return [seed for seed in self.earlier.failing if not contains(self.now.seeds, seed)]

    def _archive(self) -> None:
        now, earlier = self.now, self.earlier
        earlier.failing = sorted({failure.seed for failure in now.failures} | {*self.to_replay()})
        earlier.last_seed = self.next_seed() - 1
        earlier.commits += 1
        earlier.trials += now.trials
        earlier.refused += now.refused
        earlier.seconds = round(earlier.seconds + now.seconds, 2)
        for kind, count in now.failed.items():
            earlier.failed[kind] = earlier.failed.get(kind, 0) + count


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges in order, with touching and overlapping ranges merged."""
    result: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(last, result[-1][1]))
        else:
            result.append((first, last))
    return result


def contains(ranges: Iterable[tuple[int, int]], seed: int) -> bool:
    """Return whether a seed is in one of the ranges."""
    return any(first <= seed <= last for first, last in ranges)


def read(family: str, folder: Path = RESULTS) -> Ledger:
    """Read a family's file; an empty ledger if there is none."""
    path = folder / f"{family}.json"
    return msgspec.json.decode(path.read_bytes(), type=Ledger) if path.exists() else Ledger(family=family)


def write(ledger: Ledger, folder: Path = RESULTS) -> None:
    """Replace a family's file atomically, so that an interruption leaves the old or the new content."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{ledger.family}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(msgspec.to_builtins(ledger), indent=1) + "\n")
    part.replace(path)


def head() -> str:
    """Return the checked-out commit, with "-dirty" if tracked files other than results differ from it."""
    results = (":!tests/results", ":!benchmarks/results")
    return git("rev-parse", "HEAD") + (
        "-dirty" if git("status", "--porcelain", "-uno", "--", ".", *results) else ""
    )


def git(*arguments: str) -> str:
    """Return the output of a git command."""
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> str:
    """Return the processor's name and the number of cores."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {psutil.cpu_count()} cores"
