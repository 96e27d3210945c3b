"""Goodput-optimal speculation: meet latency targets first, then maximise tokens a second.

Before drafting, the best shape is compared with plain decoding by expected tokens a second. Once trees are
there (and their cost is spent), requests with a target get the nodes that keep them on it. Then the likeliest
nodes of all requests are taken together, as many as maximise expected tokens over time. What prompt chunks
cost in the same step is paid in any case and left out, or draft tokens would seem cheap in comparison.
Measured cost curves are staircases, so every number of nodes is considered, not only up to the first that
does not pay.

Every node makes the step longer, so the needs of all grow with it: a set of requests is on target when it is
at the resulting step time. Where not all can be, those that take the fewest nodes go first. Requests that
cannot be on target after this step get nodes as long as these cost the others that lag less than they yield.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from math import inf

import numpy as np
from numpy.typing import NDArray

from streamserve.speculation.adaserve import MOST_PICKED, Kept, likeliest
from streamserve.speculation.outlook import Drafted, Outlook
from streamserve.speculation.shapes import PLAIN, Seconds, Shape, expected_by_level
from streamserve.speculation.slo import Need

SLOWEST = 0.9
"""Requests without draft tokens, or without a target, keep this share of the speed they would have without
speculation."""

STEPS = 8
"""Catch-up horizon: steps over which a request that lags its target is to catch up."""
LEEWAY = 1.0
"""Slack in tokens: a request that is on target may fall this far below it, where others gain more by it."""
WIDTHS = (1, 2, 3, 4)
STRETCH = 16
"""Width of the intervals of node counts; an interval is searched only if its bound could hold the optimum."""
MOST_LEVELS = 16
TARGET_LEVELS = 8
"""The deepest tree common to all requests (MOST_LEVELS), and of those that lag the others (TARGET_LEVELS)."""


def shapes(outlook: Outlook) -> list[Shape]:
    """Return a shape for each candidate: the best common one, and where it leaves targets unmet, deeper ones
    for the requests that they bring on target."""
    requests = outlook.candidates
    common = best_shape(
        len(requests), outlook.others, outlook.covers, outlook.step,
        lambda shape: outlook.draft([shape] * len(requests)), MOST_LEVELS, outlook.nodes,
    )  # fmt: skip
    best = [common] * len(requests)
    asking = [*(one.need for one in requests), *outlook.undrafted]
    if all(need.tpot is None for need in asking):
        return best
    needs = with_floor([spread(one) for one in asking], outlook.step(len(requests) + outlook.others))
    seconds, worth = _prospect(outlook, needs, best)
    if worth[0] == sum(need.tpot is not None for need in needs):
        return best
    for rest in dict.fromkeys((common, PLAIN)):
        seconds, _ = _prospect(outlook, needs, [rest] * len(requests))
        asked = [need.tokens(seconds) for need in needs[: len(requests)]]
        has = _expected(outlook, rest)
        for deeper in _shapes(outlook, TARGET_LEVELS):
            brings = _expected(outlook, deeper)
            mixed = [deeper if has < need <= brings else rest for need in asked]
            if deeper in mixed:
                _, found = _prospect(outlook, needs, mixed)
                if found > worth:
                    best, worth = mixed, found
    return best


def best_shape(
    requests: int,
    others: int,
    covers: Sequence[Sequence[float]],
    step: Seconds,
    draft: Callable[[Shape], float],
    depth: int,
    nodes: int,
) -> Shape:
    """Return the shape with the most expected tokens a second for `requests` decoding requests in a batch
    with `others` query tokens that have no draft tokens; PLAIN if none beats plain decoding.

    `covers[w - 1][l]` is the probability at level l that the next token is among a node's best w candidates;
    `draft` is the cost of drafting a shape; `depth` and `nodes` are the maxima for a request.
    """
    if not requests:
        return PLAIN
    paid = step(requests + others) - step(requests)
    best, best_rate = PLAIN, requests / step(requests)
    for width in WIDTHS[: len(covers)]:
        known, expected, reached = 0.0, 1.0, 1.0
        for levels in range(1, depth + 1):
            shape = Shape(levels, width)
            if shape.nodes > nodes:
                break
            reached *= covers[width - 1][min(levels, len(covers[width - 1])) - 1]
            expected += reached
            # Deeper shapes take longer: the time of the last shape evaluated is a lower bound.
            if known and requests * expected <= best_rate * known:
                continue
            known = draft(shape) + step(requests * (1 + shape.nodes) + others) - paid
            rate = requests * expected / known
            if rate > best_rate:
                best, best_rate = shape, rate
    return best


def select(drafted: Drafted) -> Kept:
    """Return which nodes of each tree to verify: those that targets need, and of the others as many as
    maximise F(k) / (spent + T(k)), F being the expected tokens of the k likeliest nodes.

    The step never becomes longer than a request on target tolerates, with a slack of `LEEWAY` tokens; where
    requests have neither target nor tree, they keep `SLOWEST` of their speed.
    """
    if drafted.trees and all(need.tpot is None for need in (*drafted.needs, *drafted.undrafted)):
        return _select_untargeted(drafted)
    order = [list(likeliest(tree)) for tree in drafted.trees]
    chances = [
        [tree.accept[node] for node in nodes] for tree, nodes in zip(drafted.trees, order, strict=True)
    ]
    ladders = [list(accumulate(rungs, initial=1.0)) for rungs in chances]
    targets = _Targets(drafted, ladders)
    counts = _most_tokens(drafted, chances, targets.help_others(targets.meet()), targets)
    return [sorted([0, *nodes[:count]]) for nodes, count in zip(order, counts, strict=True)]


def _select_untargeted(drafted: Drafted) -> Kept:
    """Do as `select` does, where no request has a target: vectorised over all nodes."""
    sizes = [len(tree) - 1 for tree in drafted.trees]
    chances = np.array([*chain.from_iterable(tree.accept[1:] for tree in drafted.trees)], np.float64)
    # The first of equals: a parent precedes its children, and is at least as likely.
    order = np.argsort(-chances, kind="stable")[: max(drafted.budget, 0)]
    expected = len(sizes) + np.concatenate(([0.0], np.cumsum(chances[order])))
    plain = drafted.step(drafted.plain)
    limit = plain / SLOWEST if drafted.undrafted else inf
    count = _best_count(expected, drafted, plain - drafted.step(drafted.decoding), limit)
    taken = np.zeros(len(chances), np.bool_)
    taken[order[:count]] = True
    each = iter(taken.tolist())
    return [[0, *(node for node in range(1, size + 1) if next(each))] for size in sizes]


def _best_count(expected: NDArray[np.float64], drafted: Drafted, paid: float, limit: float) -> int:
    """Return the k with the highest `expected[k]` a second; the step with k draft tokens takes at most
    `limit` in all."""

    def seconds(guesses: int) -> float:
        return drafted.spent + drafted.step(drafted.plain + guesses)

    # Step time never falls: an interval's rate is at most that of its last count in the time of its shorter
    # end.
    firsts = range(0, len(expected), STRETCH)
    lasts = [min(first + STRETCH, len(expected)) - 1 for first in firsts]
    bounds = [
        expected[last] / (min(seconds(first), seconds(last)) - paid)
        for first, last in zip(firsts, lasts, strict=True)
    ]
    best, best_rate = 0, expected[0] / (seconds(0) - paid)
    for stretch in sorted(range(len(bounds)), key=lambda number: -bounds[number]):
        if bounds[stretch] < best_rate:
            break
        for guesses in range(firsts[stretch], lasts[stretch] + 1):
            took = seconds(guesses)
            rate = expected[guesses] / (took - paid)
            if took <= limit and (rate > best_rate or (rate == best_rate and guesses < best)):
                best, best_rate = guesses, rate
    return best


class _Targets:
    """The targets of one step. `ladders[i][m]` is the cumulative acceptance: the expected tokens of request i
    with its m likeliest nodes; requests without draft tokens have one entry. `met` are those that their nodes
    keep on target."""

    def __init__(self, drafted: Drafted, ladders: Sequence[Sequence[float]]) -> None:
        self.drafted = drafted
        plain = drafted.step(drafted.plain)
        self.needs = with_floor([spread(one) for one in (*drafted.needs, *drafted.undrafted)], plain)
        self.ladders: list[Sequence[float]] = [*ladders, *([1.0] for _ in drafted.undrafted)]
        self.met: list[int] = []
        left_out = any(need.tpot is None for need in drafted.undrafted)
        self.limit = plain / SLOWEST if left_out else inf

    def seconds(self, guesses: int) -> float:
        """Return the step's time with so many draft tokens, drafting included."""
        return self.drafted.spent + self.drafted.step(self.drafted.plain + guesses)

    def meet(self) -> list[int]:
        """Return node counts that bring as many requests as possible on target after this step, those that
        take the fewest nodes first."""
        counts = [0] * len(self.needs)
        start = self.seconds(0)
        asked = {
            i: bisect_left(self.ladders[i], need.tokens(start))
            for i, need in enumerate(self.needs)
            if need.tpot is not None
        }
        order = sorted((i for i in asked if asked[i] < len(self.ladders[i])), key=lambda i: (asked[i], i))
        least, most = 0, len(order)
        size = most
        while least < most:
            found = self._settle(order[:size])
            if found is None:
                most = size - 1
            else:
                least, counts = size, found
            size = (least + most + 1) // 2
        self.met = order[:least]
        return counts

    def _settle(self, members: Sequence[int]) -> list[int] | None:
        """Return the fewest nodes with which all members are on target at the time that these nodes take;
        None if there are none. (Counts only grow, so the first fixed point is the least.)"""
        counts = [0] * len(self.needs)
        while True:
            total = sum(counts)
            seconds = self.seconds(total)
            if total > self.drafted.budget or (total and seconds > self.limit):
                return None
            grown = False
            for i in members:
                count = bisect_left(self.ladders[i], self.needs[i].tokens(seconds))
                if count >= min(len(self.ladders[i]), MOST_PICKED):
                    return None
                if count > counts[i]:
                    counts[i], grown = count, True
            if not grown:
                return counts

    def help_others(self, counts: Sequence[int]) -> list[int]:
        """Add nodes for the requests that stay below target, those that need least first, while they bring
        one of them more tokens than their time costs all of them: f(v) > dT sum(1 / tpot)."""
        counts, total, met = list(counts), sum(counts), set(self.met)
        behind = [i for i, need in enumerate(self.needs) if need.tpot is not None and i not in met]
        price = sum(1 / (self.needs[i].tpot or inf) for i in behind)
        ceiling, start = self.ceiling(counts), self.seconds(total)
        for i in sorted(behind, key=lambda i: (self.needs[i].tokens(start), i)):
            ladder = self.ladders[i]
            while counts[i] + 1 < min(len(ladder), MOST_PICKED) and total < self.drafted.budget:
                seconds = self.seconds(total + 1)
                gain = ladder[counts[i] + 1] - ladder[counts[i]]
                if seconds > ceiling or gain <= (seconds - self.seconds(total)) * price:
                    break
                counts[i] += 1
                total += 1
        return counts

    def ceiling(self, counts: Sequence[int]) -> float:
        """Return how long the step may take so that requests on target stay there, or fall below by no more
        than the slack that the next steps make up for."""
        slacks = (self.needs[i].slack(self.ladders[i][counts[i]] + LEEWAY) for i in self.met)
        return min(self.limit, min(slacks, default=inf))


def _most_tokens(
    drafted: Drafted, chances: Sequence[Sequence[float]], counts: Sequence[int], targets: _Targets
) -> list[int]:
    """Add the likeliest further nodes of all trees, as many as maximise expected tokens a second."""
    counts = list(counts)
    used = sum(counts)
    rest = sorted(
        (-chance, i, rung)
        for i, rungs in enumerate(chances)
        for rung, chance in enumerate(rungs)
        if rung >= counts[i]
    )[: max(drafted.budget - used, 0)]
    paid = drafted.step(drafted.plain) - drafted.step(drafted.decoding)
    expected = sum(
        ladder[count] for ladder, count in zip(targets.ladders[: len(chances)], counts, strict=False)
    )
    best, best_rate = 0, expected / (targets.seconds(used) - paid)
    now, met, ceiling = list(counts), set(targets.met), targets.ceiling(counts)
    for more, (loss, i, _) in enumerate(rest, start=1):
        expected -= loss
        now[i] += 1
        if i in met:
            ceiling = targets.ceiling(now)
        seconds = targets.seconds(used + more)
        if seconds <= ceiling and expected / (seconds - paid) > best_rate:
            best, best_rate = more, expected / (seconds - paid)
    for _, i, _ in rest[:best]:
        counts[i] += 1
    return counts[: len(chances)]


def spread(need: Need) -> Need:
    """Return the need of a request that lags its target, with the lag distributed over `STEPS` steps: to
    catch up in one step is mostly infeasible."""
    if need.tpot is None or need.tpot == inf:
        return need
    behind = need.decode_seconds - need.decoded * need.tpot
    if behind <= 0:
        return need
    return Need(need.tpot, need.decoded * need.tpot + behind / STEPS, need.decoded)


def with_floor(needs: Sequence[Need], plain: float) -> list[Need]:
    """Return the needs, where those without a target need `SLOWEST` of the speed of a plain step of `plain`
    seconds if other requests have a target, and nothing otherwise."""
    if all(need.tpot is None for need in needs):
        return list(needs)
    floor = Need(tpot=plain / SLOWEST)
    return [floor if need.tpot is None else need for need in needs]


def _shapes(outlook: Outlook, depth: int) -> list[Shape]:
    return [
        Shape(levels, width)
        for width in WIDTHS[: len(outlook.covers)]
        for levels in range(1, depth + 1)
        if levels * width <= outlook.nodes
    ]


def _expected(outlook: Outlook, shape: Shape) -> float:
    return expected_by_level(outlook.covers[shape.width - 1], shape.depth) if shape.depth else 1.0


def _prospect(
    outlook: Outlook, needs: Sequence[Need], chosen: Sequence[Shape]
) -> tuple[float, tuple[int, float]]:
    """Return, for these shapes: seconds of drafting and step; how many requests are on target after it and,
    as a tie-break, tokens a second."""
    rows = len(chosen) + outlook.others
    seconds = outlook.draft(chosen) + outlook.step(rows + sum(shape.nodes for shape in chosen))
    known = {shape: _expected(outlook, shape) for shape in set(chosen)}
    brought = [known[shape] for shape in chosen]
    met = sum(
        need.tpot is not None and need.tokens(seconds) <= (brought[i] if i < len(brought) else 1.0)
        for i, need in enumerate(needs)
    )
    return seconds, (met, sum(brought) / seconds)
