"""`make verify`: all tests with their full counts and a slice of each campaign, in parts that can be resumed.

    python -m tests.verify                 run the parts that have not passed at this commit
    python -m tests.verify --fresh         run everything again
    python -m tests.verify --part engine   run these parts only; may be given several times

Each part's result is in tests/results/verify.json as soon as it is known, so an interruption costs one part.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import lowest
from tests.campaigns.families import FAMILIES
from tests.campaigns.ledger import REPOSITORY, machine, product_commit

RESULTS = REPOSITORY / "tests" / "results" / "verify.json"
PRODUCT = ("src", "pyproject.toml", "Makefile", "benchmarks", "examples")
"""What every result depends on, together with the test helpers and the part's own tests. Pages are checked by
`make test`."""
LIMIT_MINUTES = 60
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
    "api": ("tests/api",),
    "pairs": (
        "tests/test_pairs.py",
        "tests/test_pairs_mixed.py",
        "tests/test_pairs_widths.py",
        "tests/test_lifecycle_events.py",
        "tests/transfer",
    ),
    "fuzz": ("tests/fuzz", "tests/exhaustion", "tests/campaigns"),
    "clients": ("tests/compat", "tests/bench", "tests/benchmarks", "tests/embedded"),
}
"""Test files by part; the others are the part "rest"."""
PAGES = "tests/docs"
"""In no part: pages have figures of the very results that a verification rewrites. `make test` checks
them."""
ON_PAIRS = ("tests/api", "tests/test_llm.py", "tests/test_client.py")
COUNTS = ("passed", "failed", "error", "skipped")


@dataclass(frozen=True)
class Part:
    """A command and the file with its figures; None for a campaign, which writes its own."""

    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    report: Path | None = None
    sources: tuple[str, ...] = PRODUCT
    """The paths that its result depends on: a commit that changes none of them does not run it again."""


def parts(arguments: list[str]) -> dict[str, Part]:
    """Return all parts in the order in which they run; `arguments` are for pytest."""
    folder = REPOSITORY / "build" / "verify"
    result = {
        name: _tests(
            folder / f"{name}.json", ["--full", *_xdist_flags(PROCESSES, "worksteal")], paths, arguments
        )
        for name, paths in groups().items()
    }
    on_pairs = (("STREAMSERVE_PAIRS", "1"),)
    flags = _xdist_flags("2", "loadfile")
    result["api-on-pairs"] = _tests(folder / "on-pairs.json", flags, ON_PAIRS, arguments, on_pairs)
    report, script = folder / "readme.json", "scripts/readme.py"
    command = (sys.executable, script, "--report", str(report))
    result["readme"] = Part(command, report=report, sources=(*PRODUCT, *helpers(), script, "README.md"))
    report = folder / "lowest.json"
    command = (sys.executable, "-m", "tests.lowest", "--results", str(report), "--", *arguments)
    result["lowest"] = Part(command, report=report, sources=(*PRODUCT, *helpers(), *lowest.CORE))
    for name, family in FAMILIES.items():
        command = (sys.executable, "-m", "tests.campaigns", name, "--minutes", str(family.slice_minutes))
        result[f"campaign-{name}"] = Part(command, sources=(*PRODUCT, "tests/campaigns"))
    return result


def helpers() -> tuple[str, ...]:
    """Return the files in tests/ that are not tests: any test may use them."""
    found = (REPOSITORY / "tests").rglob("*.py")
    names = (file for file in found if not file.name.startswith("test_") and file != Path(__file__))
    return tuple(sorted(str(file.relative_to(REPOSITORY)) for file in names))


def groups() -> dict[str, tuple[str, ...]]:
    """Return folders and files by part, so that each test file is in one, those of the pages excepted."""
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
    return Part(command, environment, report, (*PRODUCT, *helpers(), *paths))


def run(part: Part) -> dict[str, Any]:
    """Run a part and return its result."""
    if part.report:
        part.report.unlink(missing_ok=True)
    began = time.monotonic()
    environment = {**os.environ, **dict(part.environment)}
    status = subprocess.run(part.command, cwd=REPOSITORY, env=environment, check=False).returncode
    report = json.loads(part.report.read_text()) if part.report and part.report.exists() else {}
    return {
        "commit": product_commit(part.sources),
        "machine": machine(),
        "exit_status": status,
        "seconds": round(time.monotonic() - began, 1),
        **{name: report[name] for name in ("seed", *COUNTS, "figures") if name in report},
    }


def passed(result: dict[str, Any] | None, commit: str) -> bool:
    """Return whether a part need not run again: it passed, at this commit, and nothing was changed since."""
    return (
        bool(result) and result["exit_status"] == 0 and result["commit"] == commit and "dirty" not in commit
    )


def read(path: Path = RESULTS) -> dict[str, Any]:
    """Return the results by part."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    results: dict[str, Any] = stored.get("parts", {})
    return results


def write(results: dict[str, Any], path: Path = RESULTS) -> None:
    """Write the results by part, and their sums."""
    sums = {name: sum(result.get(name, 0) for result in results.values()) for name in COUNTS}
    seconds = round(sum(result["seconds"] for result in results.values()), 1)
    commits = sorted({result["commit"] for result in results.values()})
    report = {"commits": commits, "seconds": seconds, **sums, "parts": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def verify(
    selected: dict[str, Part],
    fresh: bool,
    path: Path = RESULTS,
    run: Callable[[Part], dict[str, Any]] = run,
    show: Callable[[str], None] = print,
) -> bool:
    """Run those parts that have not passed at this commit; returns whether all have. Ctrl-C ends it;
    completed parts are recorded."""
    results, names = read(path), set(parts([]))
    results = {name: result for name, result in results.items() if name in names | set(selected)}
    for number, (name, part) in enumerate(selected.items(), 1):
        if not fresh and passed(results.get(name), product_commit(part.sources)):
            show(f"[{number}/{len(selected)}] {name}: passed at this commit")
            continue
        show(f"[{number}/{len(selected)}] {name}")
        try:
            results[name] = run(part)
        except KeyboardInterrupt:
            show("interrupted: completed parts are recorded")
            break
        write(results, path)
    show(table(selected, results))
    return all(results.get(name, {}).get("exit_status") == 0 for name in selected)


def table(selected: dict[str, Part], results: dict[str, Any]) -> str:
    """Return the results as lines of text."""
    lines = [f"{'part':26}{'result':12}{'minutes':>8}" + "".join(f"{name:>9}" for name in COUNTS)]
    for name, part in selected.items():
        result = results.get(name)
        if result is None:
            lines.append(f"{name:26}not run")
            continue
        state = "passed" if result["exit_status"] == 0 else "FAILED"
        state += "" if result["commit"] == product_commit(part.sources) else " *"
        counts = "".join(f"{result.get(count, ''):>9}" for count in COUNTS)
        lines.append(f"{name:26}{state:12}{result['seconds'] / 60:8.1f}{counts}")
    minutes = sum(results[name]["seconds"] for name in selected if name in results) / 60
    beyond = f", more than {LIMIT_MINUTES}" if minutes > LIMIT_MINUTES else ""
    return "\n".join([*lines, f"{minutes:.1f} minutes in all{beyond}; *: at another commit"])


def main() -> int:
    """Run the command; returns 1 if a part failed or was not run."""
    parser = argparse.ArgumentParser(prog="python -m tests.verify", description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="also run parts that have passed at this commit")
    parser.add_argument("--part", action="append", metavar="NAME", help="run this part only")
    parser.add_argument("arguments", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args()
    all_parts = parts(arguments.arguments)
    unknown = set(arguments.part or ()) - all_parts.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(all_parts)}")
    selected = {
        name: part for name, part in all_parts.items() if not arguments.part or name in arguments.part
    }
    return 0 if verify(selected, arguments.fresh) else 1


if __name__ == "__main__":
    sys.exit(main())
