"""The command `python -m tests.campaigns`; the package's docstring describes it."""

import argparse
import json
import os
import sys
from pathlib import Path

import msgspec

from tests.campaigns.drive import FilesEdited, attempt, run
from tests.campaigns.families import FAMILIES, open_campaign
from tests.campaigns.ledger import read
from tests.campaigns.outcome import Outcome

WIDTH = 30


def main() -> int:
    """Run the command; returns 1 if a trial failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    parser.add_argument("family", nargs="?", choices=sorted(FAMILIES))
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="duration of the run in minutes (default: 10)"
    )
    parser.add_argument("--seed", type=int, help="first seed; by default the first that has not been run")
    parser.add_argument("--results", type=Path, help="write the counts of this run to this file")
    parser.add_argument("--only-seed", type=int, help="replay this seed; nothing is recorded")
    given = parser.parse_args()
    if given.family is None:
        _list()
        return 0
    if given.only_seed is not None:
        return _replay(given.family, given.only_seed)
    progress = Progress(given.minutes * 60)
    try:
        done = run(given.family, given.minutes * 60, seed=given.seed, show=progress.show)
    except FilesEdited as edited:
        print(f"\n{edited}", file=sys.stderr)
        return 1
    print(file=sys.stderr)
    for seed, outcome in done.failures:
        print(f"seed {seed}: {outcome.kind}: {outcome.detail.strip()[-2000:]}")
    refused = sum(outcome.verdict == "refused" for _, outcome in done.done)
    print(
        f"{given.family}: {len(done.done)} trials in {done.seconds:.0f} s, "
        f"{refused} refused, {len(done.failures)} failed"
    )
    if done.figures:
        print(json.dumps(done.figures))
    if given.results:
        given.results.parent.mkdir(parents=True, exist_ok=True)
        given.results.write_text(json.dumps({"trials": len(done.done), "refused": refused}) + "\n")
    return 1 if done.failures else 0


class Progress:
    """A bar on standard error: the elapsed share of the time, and counts of outcomes."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._counts = {"passed": 0, "refused": 0, "failed": 0}
        # Trials send the process's own standard error elsewhere.
        self._out = os.fdopen(os.dup(sys.stderr.fileno()), "w")

    def show(self, seed: int, outcome: Outcome, passed: float) -> None:
        self._counts[outcome.verdict] += 1
        filled = min(WIDTH, int(WIDTH * passed / self._seconds))
        counts = ", ".join(f"{count} {name}" for name, count in self._counts.items())
        line = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {passed:5.0f} s, seed {seed}, {counts}"
        if outcome.verdict == "failed":
            print(f"\rseed {seed}: {outcome.kind}: {outcome.detail.strip()[-300:]}", file=self._out)
        print(f"\r{line}", end="", file=self._out, flush=True)


def _list() -> None:
    for name, family in FAMILIES.items():
        ledger = read(name)
        now, earlier = ledger.now, ledger.earlier
        print(f"{name:16} {family.description}")
        counting = now.trials if ledger.content == family.content() else 0
        print(
            f"{'':16} {counting} trials count, {now.trials + earlier.trials - counting} of earlier versions"
        )


def _replay(family: str, seed: int) -> int:
    with open_campaign(FAMILIES[family]) as campaign:
        outcome = attempt(campaign, seed)
    print(outcome.detail)
    print(json.dumps(msgspec.to_builtins(outcome), indent=1))
    return 1 if outcome.verdict == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())
