"""Run the trials of a family for a given time, and record each of them."""

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaigns.families import FAMILIES, open_campaign
from tests.campaigns.ledger import RESULTS, Ledger, head, read, write
from tests.campaigns.outcome import ERROR, UNAVAILABLE, Campaign, Outcome, TrialFailure

WRITE_SECONDS = 20.0
"""Interval in seconds at which the results file is written."""

Show = Callable[[int, Outcome, float], None]
"""Called after each trial with its seed, its outcome, and the seconds since the first began."""


class FilesEdited(Exception):
    """Files that the trials depend on were edited during a run, so they may have run with the new ones."""


@dataclass(frozen=True)
class Run:
    """The result of one run of a family: seeds and outcomes in order, and its duration."""

    done: list[tuple[int, Outcome]]
    seconds: float
    figures: dict[str, Any]

    @property
    def failures(self) -> list[tuple[int, Outcome]]:
        return [(seed, outcome) for seed, outcome in self.done if outcome.verdict == "failed"]


def run(
    family: str,
    seconds: float,
    *,
    seed: int | None = None,
    trials: int | None = None,
    folder: Path = RESULTS,
    show: Show = lambda seed, outcome, passed: None,
) -> Run:
    """Run trials for some `seconds`, at least one and at most `trials`, and add them to the family's file.

    Seeds that failed before a change come first, then new ones, beginning with `seed` if given. Ctrl-C
    ends the run; completed trials are recorded. Raises FilesEdited; trials since the last writing do not
    count then."""
    ledger = read(family, folder)
    entry = ledger.at(FAMILIES[family].content(), head())
    done: list[tuple[int, Outcome]] = []
    began = written = time.monotonic()
    figures: dict[str, Any] = {}
    with open_campaign(FAMILIES[family]) as campaign:
        began = time.monotonic()
        try:
            for number in _seeds(ledger, seed):
                started = time.monotonic()
                outcome = attempt(campaign, number)
                ended = time.monotonic()
                entry.add(number, outcome, ended - started)
                done.append((number, outcome))
                show(number, outcome, ended - began)
                if ended - written > WRITE_SECONDS:
                    written = ended
                    _store(ledger, folder)
                over = ended - began >= seconds or len(done) == trials
                if over or outcome.kind == UNAVAILABLE:
                    break
        except KeyboardInterrupt:
            print("\ninterrupted: completed trials are recorded", file=sys.stderr)
        figures = campaign.figures()
        entry.figures |= figures
    if done:
        _store(ledger, folder)
    return Run(done, time.monotonic() - began, figures)


def _store(ledger: Ledger, folder: Path) -> None:
    if FAMILIES[ledger.family].content() != ledger.content:
        raise FilesEdited(f"files that {ledger.family} depends on were edited: start it again")
    write(ledger, folder)


def attempt(campaign: Campaign, seed: int) -> Outcome:
    """Run one trial; any exception is a failure."""
    try:
        return campaign.trial(seed)
    except TrialFailure as failure:
        return Outcome(verdict="failed", kind=failure.kind, detail=failure.detail)
    except Exception:
        return Outcome(verdict="failed", kind=ERROR, detail=traceback.format_exc())


def _seeds(ledger: Ledger, first: int | None) -> Iterator[int]:
    if first is None:
        yield from ledger.to_replay()
        first = ledger.next_seed()
    while True:
        yield first
        first += 1
