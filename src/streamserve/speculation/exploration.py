"""Exploration: steps with other shapes than the policy proposes, so that the statistics stay current.

plain trial    a plain step while speculation is in use: measures the present cost of plain steps
draft trial    a chain for every request where longer trees would pay if steps were cheaper than estimated
probe          draft tokens for one request, after many plain steps
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from streamserve.speculation.learned_cost import LIMIT
from streamserve.speculation.outlook import Outlook
from streamserve.speculation.shapes import PLAIN, Shape, expected_by_level, fit
from streamserve.speculation.trials import Trials

PROBE_EVERY = 64
"""Plain steps after which one request gets draft tokens."""
PROBE = Shape(2, 1)
DRAFT_TRIAL = 64
"""Steps before the first draft trial."""
TRIAL_LEVELS = 4
TRIAL_STEPS = 4.0
"""A draft trial is a chain of up to twice TRIAL_LEVELS draft tokens, made where present chains have at most
TRIAL_LEVELS. Its step takes at most TRIAL_STEPS times the present one, as far as is known."""
TRIAL_GAIN = 1.4
"""Throughput that a draft trial must promise, relative to the present one."""


class Explored(NamedTuple):
    """The shapes of one step, the trials that its result is reported to, and whether the draft tokens are
    verified at any cost."""

    shapes: list[Shape]
    trials: Trials | None
    verify_all: bool


class Exploration:
    """When to explore, over the steps of one engine. `trials`: whether to make plain and draft trials,
    besides probes; policies that do not decide by cost make none."""

    def __init__(self, trials: bool) -> None:
        self.plain_steps = 0
        """Steps in a row for which the policy proposed no draft tokens."""
        self._trials = trials
        self._plain_trials, self._draft_trials = Trials(), Trials(DRAFT_TRIAL)

    def explore(
        self, outlook: Outlook, proposed: list[Shape], lower_bound: Callable[[int], float]
    ) -> Explored:
        """Return the proposed shapes, or others to explore. `lower_bound` returns the least seconds that a
        step with so many query tokens could take."""
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

    def _tries_plain(self, outlook: Outlook, proposed: Sequence[Shape]) -> bool:
        """Whether this step is a plain trial. It is not where speculation would pay even if plain steps took
        a third of the estimate."""
        requests = len(proposed)
        if not self._trials or not self._plain_trials.due(requests):
            return False
        tokens, seconds, _ = _prospect(outlook, proposed)
        return tokens / seconds <= LIMIT * requests / outlook.step(requests + outlook.others)

    def _tried_shape(
        self, outlook: Outlook, proposed: Sequence[Shape], lower_bound: Callable[[int], float]
    ) -> Shape:
        """Return, at intervals, the shortest chain that would pay more than the proposed shapes if steps of
        unknown cost took a third of the estimate; PLAIN where none would, or no trial is due."""
        requests = len(proposed)
        small = max(shape.depth for shape in proposed) <= TRIAL_LEVELS
        if not (self._trials and self._draft_trials.due(requests) and small):
            return PLAIN
        tokens, seconds, now = _prospect(outlook, proposed)
        for levels in range(1, min(2 * TRIAL_LEVELS, outlook.nodes) + 1):
            shape = Shape(levels, 1)
            trial_tokens, trial_seconds, query_tokens = _prospect(outlook, [shape] * requests)
            if outlook.step(query_tokens) > TRIAL_STEPS * outlook.step(now):
                break
            trial_seconds += lower_bound(query_tokens) - outlook.step(query_tokens)
            if trial_tokens / trial_seconds >= TRIAL_GAIN * tokens / seconds:
                return shape
        return PLAIN


def _prospect(outlook: Outlook, shapes: Sequence[Shape]) -> tuple[float, float, int]:
    """Return the expected tokens, the seconds and the query tokens of drafting and verifying these shapes."""
    tokens = sum(
        expected_by_level(outlook.level_acceptance[shape.width - 1], shape.depth) if shape.depth else 1.0
        for shape in shapes
    )
    query_tokens = len(shapes) + outlook.others + sum(shape.nodes for shape in shapes)
    return tokens, outlook.draft(shapes) + outlook.step(query_tokens), query_tokens
