"""The outcome of a campaign's trial, and the interface of a family of trials."""

from typing import Any, Literal, Protocol

import msgspec

Verdict = Literal["passed", "refused", "failed"]

DEATH = "death"
WRONG_TEXT = "wrong text"
WRONG_LOGPROBS = "wrong log-probabilities"
UNEXPECTED_5XX = "unexpected 5xx"
HANG = "hang"
TRACEBACK = "traceback"
UNCLEAR = "unclear refusal"
LEFT_BEHIND = "left behind"
ERROR = "error"
UNAVAILABLE = "unavailable"
"""The kind of refused trials that end a run: the machine does not permit what the family needs."""
KINDS = (DEATH, WRONG_TEXT, UNEXPECTED_5XX)
"""Kinds of failure that every results file counts, even where there are none; there may be others."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one trial.

    A `refused` trial is one whose settings were refused by name, which is correct. `kind` and `detail`
    describe a failure, with its `settings`. `counts` are summed over trials, `worst` are maxima.
    """

    verdict: Verdict
    kind: str = ""
    detail: str = ""
    settings: dict[str, Any] = {}
    counts: dict[str, int] = {}
    worst: dict[str, float] = {}


class TrialFailure(Exception):
    """A trial that failed, as a `kind` of failure."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Campaign(Protocol):
    """A family that is ready to run, for example with the server that its trials share.

    A family's module has a function `open_campaign()` that returns a context manager of such an object, or
    just a function `trial(seed)`.
    """

    def trial(self, seed: int) -> Outcome:
        """Run one trial, which depends only on `seed`."""
        ...

    def figures(self) -> dict[str, Any]:
        """Return the measurements of all trials so far."""
        ...
