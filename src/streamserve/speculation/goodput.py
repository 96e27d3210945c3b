"""Goodput-optimal speculation: meet latency targets first, then maximise tokens a second.

Before drafting, `shapes` compares the best shape with plain decoding by expected tokens a second. After
drafting, whose time is then spent, `select` first gives requests with a target the nodes that keep them on
target. Then it adds the likeliest nodes of all requests, up to the number that maximises expected tokens over
time. The time of prompt chunks in the same step is left out: it is spent in any case, and draft tokens would
seem cheap in comparison. Measured cost curves are staircases, so every number of nodes is considered, not
only up to the first that does not pay.

Every node makes the step longer, which raises the requirements of all requests. So a set of requests is on
target only if each meets its requirement at the resulting step time. Where not all can be on target, requests
that take the fewest nodes go first. A request that cannot be on target after this step gets further nodes
while a node brings it more tokens than the node's time costs all requests below target.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from math import inf

import numpy as np
from numpy.typing import NDArray

from streamserve.contracts.tree import likeliest
from streamserve.speculation.outlook import DraftedStep, Outlook, Selection
from streamserve.speculation.shapes import PLAIN, Seconds, TreeShape, expected_by_level
from streamserve.speculation.slo import LatencyRequirement

SLOWEST = 0.9
"""Requests without draft tokens, or without a target, keep this share of the speed that they would have
without speculation."""

CATCH_UP_STEPS = 8
"""Catch-up horizon: number of steps over which a request that lags its target is to catch up."""
MAX_SELECTED = 16
"""Maximum number of nodes, the root included, that a request gets for its target."""
SLACK = 1.0
"""Tokens by which a request on target may fall below it in a step, if other requests gain more by that."""
WIDTHS = (1, 2, 3, 4)
"""Widths of the trees that are compared."""
INTERVAL = 16
"""Number of node counts in each interval that `_best_count` bounds as a whole."""
MAX_LEVELS = 16
"""Maximum depth of the shape common to all requests."""
TARGET_LEVELS = 8
"""Maximum depth of the deeper shape for requests that the common one leaves below target."""


def shapes(outlook: Outlook) -> list[TreeShape]:
    """Return a shape for each candidate: the best common shape. If it leaves targets unmet, the requests that
    only a deeper shape brings on target get the deeper shape."""
    requests = outlook.candidates
    common = best_shape(
        len(requests), outlook.others, outlook.level_acceptance, outlook.step,
        lambda shape: outlook.draft([shape] * len(requests)), MAX_LEVELS, outlook.nodes,
    )  # fmt: skip
    best = [common] * len(requests)
    requirements = [*(request.requirement for request in requests), *outlook.undrafted]
    if all(requirement.tpot is None for requirement in requirements):
        return best
    requirements = with_floor(
        [with_catch_up(requirement) for requirement in requirements],
        outlook.step(len(requests) + outlook.others),
    )
    seconds, best_outcome = _prospect(outlook, requirements, best)
    if best_outcome[0] == sum(requirement.tpot is not None for requirement in requirements):
        return best
    for base in dict.fromkeys((common, PLAIN)):
        seconds, _ = _prospect(outlook, requirements, [base] * len(requests))
        required = [requirement.tokens(seconds) for requirement in requirements[: len(requests)]]
        base_expected = _expected(outlook, base)
        for deeper in _shapes(outlook, TARGET_LEVELS):
            expected = _expected(outlook, deeper)
            mixed = [deeper if base_expected < tokens <= expected else base for tokens in required]
            if deeper in mixed:
                _, outcome = _prospect(outlook, requirements, mixed)
                if outcome > best_outcome:
                    best, best_outcome = mixed, outcome
    return best


def best_shape(
    requests: int,
    others: int,
    level_acceptance: Sequence[Sequence[float]],
    step: Seconds,
    draft: Callable[[TreeShape], float],
    depth: int,
    nodes: int,
) -> TreeShape:
    """Return the shape with the most expected tokens a second for `requests` decoding requests, in a batch
    with `others` query tokens of requests without draft tokens. PLAIN if no shape beats plain decoding.

    `level_acceptance[w - 1][l]` is the probability at level l that the next token is among a node's best w
    candidates. `draft` returns the seconds of drafting a shape. `depth` and `nodes` are the maxima of a
    request's tree.
    """
    if not requests:
        return PLAIN
    prompt_seconds = step(requests + others) - step(requests)
    best, best_rate = PLAIN, requests / step(requests)
    for width in WIDTHS[: len(level_acceptance)]:
        known, expected, reached = 0.0, 1.0, 1.0
        for levels in range(1, depth + 1):
            shape = TreeShape(levels, width)
            if shape.nodes > nodes:
                break
            reached *= level_acceptance[width - 1][min(levels, len(level_acceptance[width - 1])) - 1]
            expected += reached
            # Deeper shapes take longer: the time of the last shape evaluated is a lower bound.
            if known and requests * expected <= best_rate * known:
                continue
            known = draft(shape) + step(requests * (1 + shape.nodes) + others) - prompt_seconds
            rate = requests * expected / known
            if rate > best_rate:
                best, best_rate = shape, rate
    return best


def select(drafted: DraftedStep) -> Selection:
    """Return the nodes of each tree to verify: the nodes that targets need, and the k likeliest others that
    maximise F(k) / (spent + T(k)), where F is the expected tokens and T the seconds of the step.

    The step never takes longer than requests on target tolerate, with a slack of `SLACK` tokens. Requests
    with neither target nor tree keep `SLOWEST` of their speed."""
    if drafted.trees and all(
        requirement.tpot is None for requirement in (*drafted.requirements, *drafted.undrafted)
    ):
        return _select_untargeted(drafted)
    order = [list(likeliest(tree)) for tree in drafted.trees]
    probabilities_by_tree = [
        [tree.accept[node] for node in nodes] for tree, nodes in zip(drafted.trees, order, strict=True)
    ]
    cumulative_acceptance = [
        list(accumulate(probabilities, initial=1.0)) for probabilities in probabilities_by_tree
    ]
    targets = _Targets(drafted, cumulative_acceptance)
    counts = _most_tokens(drafted, probabilities_by_tree, targets.help_others(targets.meet()), targets)
    return [sorted([0, *nodes[:count]]) for nodes, count in zip(order, counts, strict=True)]


def _select_untargeted(drafted: DraftedStep) -> Selection:
    """Return the same selection as `select` for a step in which no request has a target, vectorised over all
    nodes."""
    sizes = [len(tree) - 1 for tree in drafted.trees]
    probabilities_by_tree = np.array(
        [*chain.from_iterable(tree.accept[1:] for tree in drafted.trees)], np.float64
    )
    # Stable: a parent precedes its children and is at least as likely, so it is selected before them.
    order = np.argsort(-probabilities_by_tree, kind="stable")[: max(drafted.budget, 0)]
    # Summed node by node as in _most_tokens: a target that is always met must not change a bit.
    expected = np.cumsum(np.concatenate(([float(len(sizes))], probabilities_by_tree[order])))
    plain = drafted.step(drafted.plain)
    limit = plain / SLOWEST if drafted.undrafted else inf
    count = _best_count(expected, drafted, plain - drafted.step(drafted.decoding), limit)
    taken = np.zeros(len(probabilities_by_tree), np.bool_)
    taken[order[:count]] = True
    each = iter(taken.tolist())
    return [[0, *(node for node in range(1, size + 1) if next(each))] for size in sizes]


def _best_count(
    expected: NDArray[np.float64], drafted: DraftedStep, prompt_seconds: float, limit: float
) -> int:
    """Return the number k of draft tokens with the highest `expected[k]` a second, without the
    `prompt_seconds` of the step. Drafting and the step with k draft tokens take at most `limit` seconds."""

    def seconds(draft_tokens: int) -> float:
        return drafted.spent + drafted.step(drafted.plain + draft_tokens)

    # Tokens and step time never fall with k. So the tokens of an interval's last k over the time of its first
    # bound its rates from above, and only intervals whose bound beats the best rate are searched.
    firsts = range(0, len(expected), INTERVAL)
    lasts = [min(first + INTERVAL, len(expected)) - 1 for first in firsts]
    bounds = [
        expected[last] / (min(seconds(first), seconds(last)) - prompt_seconds)
        for first, last in zip(firsts, lasts, strict=True)
    ]
    best, best_rate = 0, expected[0] / (seconds(0) - prompt_seconds)
    for interval in sorted(range(len(bounds)), key=lambda number: -bounds[number]):
        if bounds[interval] < best_rate:
            break
        for draft_tokens in range(firsts[interval], lasts[interval] + 1):
            took = seconds(draft_tokens)
            rate = expected[draft_tokens] / (took - prompt_seconds)
            if took <= limit and (rate > best_rate or (rate == best_rate and draft_tokens < best)):
                best, best_rate = draft_tokens, rate
    return best


class _Targets:
    """The latency targets of one step.

    * `cumulative_acceptance[i][m]`: expected tokens of request i with its m likeliest nodes. Requests without
      draft tokens have one entry.
    * `met`: indices of the requests that their nodes keep on target, after `meet`.
    * `limit`: maximum seconds of the step, for the sake of requests with neither target nor tree.
    """

    def __init__(self, drafted: DraftedStep, cumulative_acceptance: Sequence[Sequence[float]]) -> None:
        self.drafted = drafted
        plain = drafted.step(drafted.plain)
        self.requirements = with_floor(
            [with_catch_up(requirement) for requirement in (*drafted.requirements, *drafted.undrafted)], plain
        )
        self.cumulative_acceptance: list[Sequence[float]] = [
            *cumulative_acceptance,
            *([1.0] for _ in drafted.undrafted),
        ]
        self.met: list[int] = []
        has_untargeted = any(requirement.tpot is None for requirement in drafted.undrafted)
        self.limit = plain / SLOWEST if has_untargeted else inf

    def seconds(self, draft_tokens: int) -> float:
        """Return the seconds of drafting and of the step with `draft_tokens`."""
        return self.drafted.spent + self.drafted.step(self.drafted.plain + draft_tokens)

    def meet(self) -> list[int]:
        """Return node counts that bring the most requests on target after this step; requests that take the
        fewest nodes come first."""
        counts = [0] * len(self.requirements)
        start = self.seconds(0)
        required = {
            i: bisect_left(self.cumulative_acceptance[i], requirement.tokens(start))
            for i, requirement in enumerate(self.requirements)
            if requirement.tpot is not None
        }
        order = sorted(
            (i for i in required if required[i] < len(self.cumulative_acceptance[i])),
            key=lambda i: (required[i], i),
        )
        # Binary search for the longest prefix of `order` that can be on target. All of them are tried first.
        low, high = 0, len(order)
        size = high
        while low < high:
            outcome = self._fewest_nodes(order[:size])
            if outcome is None:
                high = size - 1
            else:
                low, counts = size, outcome
            size = (low + high + 1) // 2
        self.met = order[:low]
        return counts

    def _fewest_nodes(self, members: Sequence[int]) -> list[int] | None:
        """Return the smallest node counts with which all `members` are on target at the resulting step time;
        None if there are none. Counts only grow, so the first fixed point is the smallest."""
        counts = [0] * len(self.requirements)
        while True:
            total = sum(counts)
            seconds = self.seconds(total)
            if total > self.drafted.budget or (total and seconds > self.limit):
                return None
            grown = False
            for i in members:
                count = bisect_left(self.cumulative_acceptance[i], self.requirements[i].tokens(seconds))
                if count >= min(len(self.cumulative_acceptance[i]), MAX_SELECTED):
                    return None
                if count > counts[i]:
                    counts[i], grown = count, True
            if not grown:
                return counts

    def help_others(self, counts: Sequence[int]) -> list[int]:
        """Return `counts` with more nodes for the requests below target, in ascending order of requirements.
        A request gets nodes while a node brings it more tokens than its time costs all requests below target:
        f(v) > dT sum(1 / tpot)."""
        counts, total, met = list(counts), sum(counts), set(self.met)
        lagging = [
            i
            for i, requirement in enumerate(self.requirements)
            if requirement.tpot is not None and i not in met
        ]
        token_price = sum(1 / (self.requirements[i].tpot or inf) for i in lagging)
        ceiling, start = self.ceiling(counts), self.seconds(total)
        for i in sorted(lagging, key=lambda i: (self.requirements[i].tokens(start), i)):
            cumulative = self.cumulative_acceptance[i]
            while counts[i] + 1 < min(len(cumulative), MAX_SELECTED) and total < self.drafted.budget:
                seconds = self.seconds(total + 1)
                gain = cumulative[counts[i] + 1] - cumulative[counts[i]]
                if seconds > ceiling or gain <= (seconds - self.seconds(total)) * token_price:
                    break
                counts[i] += 1
                total += 1
        return counts

    def ceiling(self, counts: Sequence[int]) -> float:
        """Return the maximum seconds of the step with which requests on target fall at most SLACK tokens
        below it, which the next steps make up for."""
        slacks = (
            self.requirements[i].slack(self.cumulative_acceptance[i][counts[i]] + SLACK) for i in self.met
        )
        return min(self.limit, min(slacks, default=inf))


def _most_tokens(
    drafted: DraftedStep,
    probabilities_by_tree: Sequence[Sequence[float]],
    counts: Sequence[int],
    targets: _Targets,
) -> list[int]:
    """Return `counts` with the likeliest further nodes of all trees, up to the number that maximises expected
    tokens a second."""
    counts = list(counts)
    used = sum(counts)
    remaining = sorted(
        (-chance, i, node)
        for i, probabilities in enumerate(probabilities_by_tree)
        for node, chance in enumerate(probabilities)
        if node >= counts[i]
    )[: max(drafted.budget - used, 0)]
    prompt_seconds = drafted.step(drafted.plain) - drafted.step(drafted.decoding)
    expected = sum(
        cumulative[count]
        for cumulative, count in zip(
            targets.cumulative_acceptance[: len(probabilities_by_tree)], counts, strict=False
        )
    )
    best, best_rate = 0, expected / (targets.seconds(used) - prompt_seconds)
    now, met, ceiling = list(counts), set(targets.met), targets.ceiling(counts)
    for added, (loss, i, _) in enumerate(remaining, start=1):
        expected -= loss
        now[i] += 1
        if i in met:
            ceiling = targets.ceiling(now)
        seconds = targets.seconds(used + added)
        if seconds <= ceiling and expected / (seconds - prompt_seconds) > best_rate:
            best, best_rate = added, expected / (seconds - prompt_seconds)
    for _, i, _ in remaining[:best]:
        counts[i] += 1
    return counts[: len(probabilities_by_tree)]


def with_catch_up(requirement: LatencyRequirement) -> LatencyRequirement:
    """Return the requirement, with the lag of a request below its target distributed over `CATCH_UP_STEPS`
    steps: catching up in one step is mostly infeasible."""
    if requirement.tpot is None or requirement.tpot == inf:
        return requirement
    on_target = requirement.decoded * requirement.tpot
    lag = requirement.decode_seconds - on_target
    if lag <= 0:
        return requirement
    return LatencyRequirement(requirement.tpot, on_target + lag / CATCH_UP_STEPS, requirement.decoded)


def with_floor(requirements: Sequence[LatencyRequirement], plain: float) -> list[LatencyRequirement]:
    """Return the requirements, with a floor for requests without a target if other requests have one: they
    require `SLOWEST` of the speed of a plain step, which takes `plain` seconds."""
    if all(requirement.tpot is None for requirement in requirements):
        return list(requirements)
    floor = LatencyRequirement(tpot=plain / SLOWEST)
    return [floor if requirement.tpot is None else requirement for requirement in requirements]


def _shapes(outlook: Outlook, depth: int) -> list[TreeShape]:
    return [
        TreeShape(levels, width)
        for width in WIDTHS[: len(outlook.level_acceptance)]
        for levels in range(1, depth + 1)
        if levels * width <= outlook.nodes
    ]


def _expected(outlook: Outlook, shape: TreeShape) -> float:
    return expected_by_level(outlook.level_acceptance[shape.width - 1], shape.depth) if shape.depth else 1.0


def _prospect(
    outlook: Outlook, requirements: Sequence[LatencyRequirement], chosen: Sequence[TreeShape]
) -> tuple[float, tuple[int, float]]:
    """Return the seconds of drafting and step with the `chosen` shapes, and the outcome to compare: the
    number of requests on target after it, and as a tie-break the tokens a second."""
    query_tokens = len(chosen) + outlook.others
    seconds = outlook.draft(chosen) + outlook.step(query_tokens + sum(shape.nodes for shape in chosen))
    known = {shape: _expected(outlook, shape) for shape in set(chosen)}
    expected = [known[shape] for shape in chosen]
    met = sum(
        requirement.tpot is not None
        and requirement.tokens(seconds) <= (expected[i] if i < len(expected) else 1.0)
        for i, requirement in enumerate(requirements)
    )
    return seconds, (met, sum(expected) / seconds)
