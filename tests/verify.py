"""`make verify`: all tests with their full counts and a slice of each campaign, in parts that can be resumed.

    python -m tests.verify                 run the parts that have not passed as the files are now
    python -m tests.verify --fresh         run everything again
    python -m tests.verify --part engine   run these parts only; may be given several times

A part counts while nothing that it depends on changes: files, by content, this machine, its packages, and
arguments and variables that change tests. Its result is in build/verify/ as soon as it is known, so an
interruption costs one part. When all parts count, without such arguments and variables, and their files are
those of the checked-out commit, tests/results/verify.json is written, and the pages that show it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import render_pages
from tests import lowest
from tests.campaigns.families import FAMILIES
from tests.campaigns.ledger import REPOSITORY, git, machine
from tests.dependencies import Tree, read
from tests.dependencies.tree import digest_of
from tests.selection import environment

FOLDER = REPOSITORY / "build" / "verify"
RESULTS = REPOSITORY / "tests" / "results" / "verify.json"
"""The last complete run: all parts at one commit, on one machine."""
LIMIT_MINUTES = 90
PROCESSES = "3"

GROUPS: dict[str, tuple[str, ...]] = {
    "exact": ("tests/exact",),
    "execution": ("tests/execution",),
    "engine": (
        "tests/engine",
        "tests/scheduling",
        "tests/baselines",
        "tests/speculation",
        "tests/text",
        "tests/protocol",
    ),
    "simulate": ("tests/simulate", "tests/fleet", "tests/combinations", "tests/effects"),
    "draft_service": ("tests/draft_service", "tests/test_draft_service.py"),
    "api": (
        "tests/api",
        "tests/extras/anthropic",
        "tests/extras/batches",
        "tests/extras/ollama",
        "tests/extras/responses",
        "tests/extras/web_page",
    ),
    "pairs": (
        "tests/test_pairs.py",
        "tests/test_pairs_mixed.py",
        "tests/test_pairs_widths.py",
        "tests/test_lifecycle_events.py",
        "tests/transfer",
        "tests/extras/nixl",
    ),
    "fuzz": ("tests/fuzz", "tests/exhaustion", "tests/campaigns"),
    "clients": ("tests/compat", "tests/extras/bench", "tests/benchmarks", "tests/embedded"),
}
"""Test files by part. All other files are the part "rest"."""
NAMED_IN_README = ("README.md", "Makefile", "mkdocs.yml", "src", "docs", "examples", "scripts")
"""Files and folders that the README's commands use."""
PAGES = "tests/docs"
"""Tests that are in no part, because pages have figures of the results that a verification writes. `make
test` runs them."""
ON_PAIRS = (*GROUPS["api"], "tests/test_llm.py", "tests/test_client.py")
COUNTS = ("passed", "failed", "error", "skipped")
OF_TRIALS = ("trials", "refused")
NOT_COMMITTED = ("dist", "build", ".venv")
"""Folders with files that are made from the files of a commit."""


@dataclass(frozen=True)
class Part:
    """A command and the file with its counts.

    `roots`: the files and folders that it runs. Its result is valid while nothing that these depend on
    changes.
    """

    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    report: Path | None = None
    roots: tuple[str, ...] = ()


def parts(arguments: list[str]) -> dict[str, Part]:
    """Return all parts in the order in which they run; `arguments` are for pytest."""
    result = {
        name: _tests(
            FOLDER / f"{name}.json", ["--full", *_xdist_flags(PROCESSES, "worksteal")], paths, arguments
        )
        for name, paths in groups().items()
    }
    on_pairs = (("STREAMSERVE_PAIRS", "1"),)
    flags = _xdist_flags("2", "loadfile")
    result["api-on-pairs"] = _tests(FOLDER / "on-pairs.json", flags, ON_PAIRS, arguments, on_pairs)
    report, script = FOLDER / "readme.json", "scripts/readme.py"
    command = (sys.executable, script, "--report", str(report))
    result["readme"] = Part(command, report=report, roots=(script, *NAMED_IN_README))
    report = FOLDER / "lowest.json"
    command = (sys.executable, "-m", "tests.lowest", "--results", str(report), "--", *arguments)
    result["lowest"] = Part(command, report=report, roots=("tests/lowest.py", *lowest.CORE))
    for name, family in FAMILIES.items():
        report, minutes = FOLDER / f"campaign-{name}.json", str(family.slice_minutes)
        command = (sys.executable, "-m", "tests.campaigns", name, "--minutes", minutes)
        command = (*command, "--results", str(report))
        result[f"campaign-{name}"] = Part(command, report=report, roots=(family.file,))
    return result


def groups() -> dict[str, tuple[str, ...]]:
    """Return folders and files by part. Each test file is in one part, except for the tests of pages."""
    named = [REPOSITORY / path for paths in (*GROUPS.values(), (PAGES,)) for path in paths]
    files = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    rest = [file for file in files if not any(file.is_relative_to(path) for path in named)]
    return GROUPS | {"rest": tuple(str(file.relative_to(REPOSITORY)) for file in rest)}


def _xdist_flags(processes: str, how: str) -> list[str]:
    return ["--numprocesses", processes, "--dist", how]


def _tests(
    report: Path,
    flags: list[str],
    paths: tuple[str, ...],
    arguments: list[str],
    environment: tuple[tuple[str, str], ...] = (),
) -> Part:
    command = (sys.executable, "-m", "pytest", *flags, "--results", str(report), *paths, *arguments)
    return Part(command, environment, report, paths)


def run(part: Part) -> dict[str, Any]:
    """Run a part and return its result."""
    if part.report:
        part.report.unlink(missing_ok=True)
    began = time.monotonic()
    environment = {**os.environ, **dict(part.environment)}
    status = subprocess.run(part.command, cwd=REPOSITORY, env=environment, check=False).returncode
    report = json.loads(part.report.read_text()) if part.report and part.report.exists() else {}
    return {
        "exit_status": status,
        "seconds": round(time.monotonic() - began, 1),
        **{name: report[name] for name in ("seed", *COUNTS, *OF_TRIALS, "figures") if name in report},
    }


def restrictions(arguments: list[str]) -> list[str]:
    """Return the arguments for pytest and the variables with which a run differs from `make verify`."""
    names = (name for name in os.environ if name.startswith("STREAMSERVE_") or name == "PYTEST_ADDOPTS")
    return [*arguments, *(f"{name}={os.environ[name]}" for name in sorted(names))]


@dataclass
class Verification:
    """Runs parts, and stores their results: the results of an unfinished run in `working`, a complete run in
    `complete`.

    `run` runs a part, `tree` reads the files, `changed` returns those that differ from the commit: tests
    replace them. With `restrictions`, parts count for themselves alone, and no run is complete.
    """

    parts: dict[str, Part]
    working: Path = FOLDER / "results.json"
    complete: Path = RESULTS
    run: Callable[[Part], dict[str, Any]] = run
    tree: Callable[[], Tree] = read
    changed: Callable[[], Collection[str]] = lambda: changed_files()
    show: Callable[[str], None] = print
    restrictions: Collection[str] = ()
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stored = json.loads(self.working.read_text()) if self.working.exists() else {}
        self.results = {name: result for name, result in stored.items() if name in self.parts}
        self.conditions = digest_of(f"{part}\n" for part in (environment(), *self.restrictions))

    def counts(self, name: str, content: str) -> bool:
        """Return whether a part need not run again: it passed here, and nothing it depends on changed."""
        result = self.results.get(name, {})
        here = (content, machine(), self.conditions)
        depends = tuple(result.get(key) for key in ("content", "machine", "conditions"))
        return passed(result) and depends == here

    def verify(self, selected: Collection[str], fresh: bool = False) -> bool:
        """Run the selected parts that do not count; return whether all of them count afterwards. Ctrl-C ends
        the run."""
        contents = self._contents()
        for number, name in enumerate(selected, 1):
            step, content = f"[{number}/{len(selected)}] {name}", contents[name]
            if not fresh and self.counts(name, content):
                self.show(f"{step}: passed, and nothing that it depends on has changed")
                continue
            self.show(step)
            try:
                result = self.run(self.parts[name])
            except KeyboardInterrupt:
                self.show("interrupted: completed parts are recorded")
                break
            contents = self._contents()
            self.results[name] = {
                "content": content if contents[name] == content else "changed while it ran",
                "commit": git("rev-parse", "HEAD"),
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "machine": machine(),
                "conditions": self.conditions,
                **result,
            }
            _write(self.working, self.results)
        contents = self._contents()
        self.show(self.table(selected, contents))
        if all(self.counts(name, content) for name, content in contents.items()):
            self._record()
        return all(self.counts(name, contents[name]) for name in selected)

    def table(self, selected: Collection[str], contents: Mapping[str, str]) -> str:
        """Return the results of these parts as lines of text, with the minutes of each and of all."""
        lines = [f"{'part':28}{'result':12}{'minutes':>8}" + "".join(f"{name:>9}" for name in COUNTS)]
        seconds = 0.0
        for name in selected:
            result = self.results.get(name)
            if result is None:
                lines.append(f"{name:28}not run")
                continue
            seconds += result["seconds"]
            state = "passed" if passed(result) else "FAILED"
            state += "" if result["content"] == contents[name] else " *"
            counts = "".join(f"{result.get(count, ''):>9}" for count in COUNTS)
            lines.append(f"{name:28}{state:12}{result['seconds'] / 60:8.1f}{counts}")
        beyond = f", more than {LIMIT_MINUTES}" if seconds > LIMIT_MINUTES * 60 else ""
        return "\n".join([*lines, f"{seconds / 60:.1f} minutes in all{beyond}; *: of other files than now"])

    def _contents(self) -> dict[str, str]:
        """Return a hash of everything that each part depends on, from the current files."""
        tree = self.tree()
        return {name: tree.content(part.roots) for name, part in self.parts.items()}

    def _record(self) -> None:
        """Write the complete run, unless its files belong to no commit, or it is recorded already."""
        if self.restrictions:
            self.show(f"all parts passed, not recorded: run with {' '.join(self.restrictions)}")
            return
        roots = [root for part in self.parts.values() for root in part.roots]
        commit, differing = git("rev-parse", "HEAD"), set(self.changed()) & set(self.tree().closure(roots))
        if differing or not commit:
            self.show(
                f"all parts passed. Commit and run this again to record it: {len(differing)} files differ "
                f"from the commit: {', '.join(sorted(differing)[:5])}"
            )
            return
        recorded = json.loads(self.complete.read_text()) if self.complete.exists() else {}
        if recorded.get("parts") == self.results:
            self.show(f"all parts passed, as recorded at commit {recorded['commit'][:12]}")
            return
        report = {
            "commit": commit,
            "date": max(result["date"] for result in self.results.values()),
            "machine": machine(),
            "seconds": round(sum(result["seconds"] for result in self.results.values()), 1),
            **{name: sum(result.get(name, 0) for result in self.results.values()) for name in COUNTS},
            "parts": self.results,
        }
        _write(self.complete, report)
        self.show(f"verified at commit {commit[:12]}: {self.complete.name} is written")
        if self.complete == RESULTS:
            render_pages()


def changed_files() -> list[str]:
    """Return the files that differ from the checked-out commit, or that it does not have, ignored or not."""
    tracked = git("diff", "--name-only", "-z", "HEAD")
    others = git("ls-files", "--others", "-z", "--", *(f":!{folder}" for folder in NOT_COMMITTED))
    return [name for name in f"{tracked}\0{others}".split("\0") if name]


def passed(result: Mapping[str, Any]) -> bool:
    """Return whether a part ran something, and nothing failed."""
    return result.get("exit_status") == 0 and result.get("passed", 0) + result.get("trials", 0) > 0


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace the file at once, so that an interruption leaves the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def main() -> int:
    """Run the command; returns 1 if a part failed or was not run."""
    parser = argparse.ArgumentParser(prog="python -m tests.verify", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--fresh", action="store_true", help="also run parts that have passed as they are now"
    )
    parser.add_argument("--part", action="append", metavar="NAME", help="run this part only")
    parser.add_argument("arguments", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args()
    all_parts = parts(arguments.arguments)
    unknown = set(arguments.part or ()) - all_parts.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(all_parts)}")
    selected = [name for name in all_parts if not arguments.part or name in arguments.part]
    verification = Verification(all_parts, restrictions=restrictions(arguments.arguments))
    return 0 if verification.verify(selected, arguments.fresh) else 1


if __name__ == "__main__":
    sys.exit(main())
