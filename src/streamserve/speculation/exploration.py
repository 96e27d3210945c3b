"""Exploration: steps with other shapes than the policy proposes, so that the statistics stay current.

plain trial    a plain step while speculation is in use: measures the present cost of plain steps
draft trial    a chain for every request, if longer trees would pay in case steps are cheaper than estimated
probe          draft tokens for one request, after many plain steps
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from streamserve.speculation.learned_cost import LIMIT
from streamserve.speculation.outlook import Outlook
from streamserve.speculation.shapes import PLAIN, TreeShape, expected_by_level, fit
from streamserve.speculation.trials import Trials

PROBE_EVERY = 64
"""Plain steps after which one request gets draft tokens."""
PROBE = TreeShape(2, 1)
DRAFT_TRIAL = 64
"""Steps before the first draft trial."""
TRIAL_LEVELS = 4
"""Draft trials are made while the proposed trees have at most this depth. A trial's chain has at most twice
this depth."""
TRIAL_STEPS = 4.0
"""Maximum estimated seconds of a draft trial's step, relative to the step with the proposed shapes."""
TRIAL_GAIN = 1.4
"""Minimum throughput that a draft trial must promise, relative to the proposed shapes."""


class Explored(NamedTuple):
    """The shapes to draft in one step, the `Trials` to report its seconds to, and whether all draft tokens
    are verified whatever that costs."""

    shapes: list[TreeShape]
    trials: Trials | None
    verify_all: bool


class Exploration:
    """The exploration of one engine over its steps. `trials`: whether to make plain and draft trials in
    addition to probes; they are of no use to policies that do not weigh costs."""

    def __init__(self, trials: bool) -> None:
        self.plain_steps = 0
        """Number of latest steps in a row for which the policy proposed no draft tokens."""
        self._trials = trials
        self._plain_trials, self._draft_trials = Trials(), Trials(DRAFT_TRIAL)

    def explore(
        self, outlook: Outlook, proposed: list[TreeShape], lower_bound: Callable[[int], float]
    ) -> Explored:
        """Return the proposed shapes, or other shapes for exploration. `lower_bound` returns the least
        seconds that a step could take, by its query tokens."""
        if any(shape.depth for shape in proposed):
            self.plain_steps = 0
            if self._tries_plain(outlook, proposed):
                return Explored([PLAIN] * len(proposed), self._plain_trials, False)
        else:
            self.plain_steps += 1
        if (shape := self._tried_shape(outlook, proposed, lower_bound)).depth:
            tried = [
                fit(shape, candidate.depth, min(candidate.nodes, outlook.nodes))
                for candidate in outlook.candidates
            ]
            return Explored(tried, self._draft_trials, True)
        if not self.plain_steps or self.plain_steps % PROBE_EVERY:
            return Explored(proposed, None, self.plain_steps > 0)
        number = self.plain_steps // PROBE_EVERY % len(proposed)
        probe = [
            fit(PROBE, candidate.depth, candidate.nodes) if i == number else PLAIN
            for i, candidate in enumerate(outlook.candidates)
        ]
        return Explored(probe, None, True)

    def _tries_plain(self, outlook: Outlook, proposed: Sequence[TreeShape]) -> bool:
        """Whether this step is a plain trial. A due trial is skipped if speculation would pay even if a plain
        step took 1/LIMIT of its estimate."""
        requests = len(proposed)
        if not self._trials or not self._plain_trials.due(requests):
            return False
        tokens, seconds, _ = _prospect(outlook, proposed)
        return tokens / seconds <= LIMIT * requests / outlook.step(requests + outlook.others)

    def _tried_shape(
        self, outlook: Outlook, proposed: Sequence[TreeShape], lower_bound: Callable[[int], float]
    ) -> TreeShape:
        """Return the chain of a draft trial: the shortest one that would yield TRIAL_GAIN times the
        throughput of the proposed shapes, if its step took `lower_bound`. PLAIN if there is none, or no trial
        is due."""
        requests = len(proposed)
        small = max(shape.depth for shape in proposed) <= TRIAL_LEVELS
        if not (self._trials and self._draft_trials.due(requests) and small):
            return PLAIN
        tokens, seconds, now = _prospect(outlook, proposed)
        for levels in range(1, min(2 * TRIAL_LEVELS, outlook.nodes) + 1):
            shape = TreeShape(levels, 1)
            trial_tokens, trial_seconds, query_tokens = _prospect(outlook, [shape] * requests)
            if outlook.step(query_tokens) > TRIAL_STEPS * outlook.step(now):
                break
            trial_seconds += lower_bound(query_tokens) - outlook.step(query_tokens)
            if trial_tokens / trial_seconds >= TRIAL_GAIN * tokens / seconds:
                return shape
        return PLAIN


def _prospect(outlook: Outlook, shapes: Sequence[TreeShape]) -> tuple[float, float, int]:
    """Return the expected tokens, the seconds and the query tokens of drafting and verifying these shapes."""
    tokens = sum(
        expected_by_level(outlook.level_acceptance[shape.width - 1], shape.depth) if shape.depth else 1.0
        for shape in shapes
    )
    query_tokens = len(shapes) + outlook.others + sum(shape.nodes for shape in shapes)
    return tokens, outlook.draft(shapes) + outlook.step(query_tokens), query_tokens
