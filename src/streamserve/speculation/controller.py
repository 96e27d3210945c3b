"""The speculation controller: chooses shapes to draft and draft tokens to verify, and learns from the
results.

The engine calls `shapes` before drafting, `choose` once the trees have arrived, and `drafted`, `verified` and
`stepped` with the results. policies.py decides; this module keeps the statistics it decides by.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

from streamserve.protocol.reports import SpeculationReport
from streamserve.speculation import policies
from streamserve.speculation.acceptance import Acceptance
from streamserve.speculation.goodput import MOST_LEVELS, WIDTHS
from streamserve.speculation.learned_cost import LIMIT, RefinedCost
from streamserve.speculation.outlook import SURE_LEVELS, Candidate, Drafted, Means, Outlook
from streamserve.speculation.policies import MOST_DEPTH, SpeculationPolicy
from streamserve.speculation.shapes import PLAIN, Shape, expected_by_level, fit
from streamserve.speculation.slo import Need
from streamserve.speculation.specustream import Flow
from streamserve.speculation.tree import TokenTree
from streamserve.speculation.trials import Trials

PROBE_EVERY = 64
"""Plain steps after which one request gets draft tokens, so that the statistics stay current."""
PROBE = Shape(2, 1)
FIRST_HITS = (0.7, 0.08, 0.04, 0.02)
"""Initial probability that a node's first, second, … candidate token is accepted."""
DRAFT_TRIAL = 64
"""Steps before a trial of speculation that only pays if its steps are cheaper than estimated."""
TRIAL_LEVELS = 4
TRIAL_STEPS = 4.0
"""Such a trial is a chain of up to twice TRIAL_LEVELS draft tokens, made where present chains have at most
TRIAL_LEVELS. Its step takes at most TRIAL_STEPS times the present one, as far as is known."""
TRIAL_GAIN = 1.4
"""Throughput that a trial must promise, relative to the present one."""
DOUBT = 20.0
"""Observations of a tree level after which they weigh as much as the statistics of the level above."""
MEMORY = 400.0
"""Observations of a level after which older ones fade from the statistics that shapes are chosen by."""
RECENT = 0.1
"""Weight of the last step in the recent throughput."""
CATCH_UP = 32
"""Drafting that first had to read more tokens than this is no measurement of the cost of drafting."""


@dataclass
class Counters:
    """Totals of speculation so far, as in SpeculationReport."""

    drafts: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    expected: float = 0.0
    accepted_at: list[int] = field(default_factory=lambda: [0] * MOST_DEPTH)
    trees_by_nodes: list[int] = field(default_factory=list)
    trees_by_depth: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    select_seconds: float = 0.0


class Speculation:
    """The state of one engine's speculation. `prior` is the cost of a step in seconds by query tokens and KV
    tokens, from a profile or a default; only ratios matter until steps were timed. `draft` is the cost of one
    tree level by number of nodes; without it an eighth of a step is assumed."""

    def __init__(
        self,
        policy: SpeculationPolicy,
        prior: Callable[[int, int], float],
        draft: Callable[[float], float] | None = None,
    ) -> None:
        self.policy = policy
        self.counters = Counters()
        self.acceptance = Acceptance()
        self.step_cost = RefinedCost(prior)
        self.pass_cost = RefinedCost(lambda rows, kv: draft(rows) if draft else self.step_cost(rows, kv) / 8)
        self._tried = [[0.0] * len(WIDTHS) for _ in range(MOST_LEVELS)]
        self._hits = [[0.0] * len(WIDTHS) for _ in range(MOST_LEVELS)]
        self._known_covers: list[list[float]] | None = None
        self._asked: dict[int, Shape] = {}
        self._plain_steps = 0
        self._plain_trials, self._draft_trials = Trials(), Trials(DRAFT_TRIAL)
        self._trial: Trials | None = None
        self._drafted: dict[int, TokenTree] = {}
        self._flow = Flow()
        self.drafting_seconds = 0.0
        self._throughput = 0.0
        self._step_guesses = self._step_accepted = self._step_tested = 0

    def shapes(
        self, wanting: Sequence[Candidate], others: int, kv_tokens: int, nodes: int,
        undrafted: Sequence[Need] = (), load: float = 0.0,
    ) -> list[Shape]:  # fmt: skip
        """Return a shape for each decoding request, within its limits and `nodes` draft tokens each; PLAIN
        where nothing is to be drafted. The step has `others` further query tokens and reads `kv_tokens`.
        `undrafted` are the needs of decoding requests without draft tokens in the batch, `load` the share of
        sequence slots taken."""
        self._drafted = {}
        if self.policy.kind == "off" or not wanting:
            return [PLAIN] * len(wanting)
        outlook = Outlook(
            candidates=wanting,
            others=others,
            step=cache(lambda rows: self.step_cost(rows, kv_tokens)),
            draft=self._draft_cost,
            covers=self._covers(),
            nodes=max(nodes, 0),
            undrafted=undrafted,
            load=load,
            acceptance=self._step_accepted / self._step_guesses if self._step_guesses else None,
            right=self._step_accepted,
            tested=self._step_tested,
            throughput=self._throughput,
        )
        found, self._flow = policies.shapes(self.policy, outlook, self._flow)
        chosen = [
            fit(shape, one.depth, min(one.nodes, outlook.nodes))
            for shape, one in zip(found, wanting, strict=True)
        ]
        if any(shape.depth for shape in chosen):
            self._plain_steps = 0
            if self._tries_plain(outlook, chosen):
                return [PLAIN] * len(wanting)
        else:
            self._plain_steps += 1
        if (shape := self._tried_shape(outlook, chosen, kv_tokens)).depth:
            return [fit(shape, one.depth, min(one.nodes, outlook.nodes)) for one in wanting]
        if not self._plain_steps or self._plain_steps % PROBE_EVERY:
            return chosen
        number = self._plain_steps // PROBE_EVERY % len(wanting)
        return [fit(PROBE, one.depth, one.nodes) if i == number else PLAIN for i, one in enumerate(wanting)]

    def _tries_plain(self, outlook: Outlook, chosen: Sequence[Shape]) -> bool:
        """Whether this step is to be a plain one, to measure the present cost of plain steps. It is not where
        speculation would pay even if they took a third of the estimate."""
        requests = len(chosen)
        if self.policy.kind != "goodput" or not self._plain_trials.due(requests):
            return False
        tokens, seconds, _ = _prospect(outlook, chosen)
        if tokens / seconds > LIMIT * requests / outlook.step(requests + outlook.others):
            return False
        self._trial = self._plain_trials
        return True

    def _tried_shape(self, outlook: Outlook, chosen: Sequence[Shape], kv_tokens: int) -> Shape:
        """Return, at intervals, the shortest chain that would pay more than the chosen shapes if steps of
        unknown cost took a third of the estimate; PLAIN where none would, or no trial is due."""
        requests = len(chosen)
        small = max(shape.depth for shape in chosen) <= TRIAL_LEVELS
        if not (self.policy.kind == "goodput" and self._draft_trials.due(requests) and small):
            return PLAIN
        tokens, seconds, now = _prospect(outlook, chosen)
        for levels in range(1, min(2 * TRIAL_LEVELS, outlook.nodes) + 1):
            shape = Shape(levels, 1)
            promised, took, rows = _prospect(outlook, [shape] * requests)
            if outlook.step(rows) > TRIAL_STEPS * outlook.step(now):
                break
            took += self.step_cost.at_least(rows, kv_tokens) - outlook.step(rows)
            if promised / took >= TRIAL_GAIN * tokens / seconds:
                self._trial = self._draft_trials
                return shape
        return PLAIN

    def reading(self, decoding: int, kv_tokens: int) -> Callable[[int, float], bool]:
        """Return, for a step with `decoding` sequences, a function that tells whether to draft for a request
        of which the draft model has `unread` tokens to read and `left` output tokens are expected: the
        reading must take no longer than draft tokens should save. Policies other than `goodput` always
        draft."""
        if self.policy.kind != "goodput":
            return lambda unread, left: True
        brings = expected_by_level(self._covers()[0], SURE_LEVELS)
        saved = (1 - 1 / brings) * self.step_cost(decoding, kv_tokens) / max(decoding, 1)
        price = cache(lambda stretches: self.pass_cost(stretches * CATCH_UP, 0))  # requests share values
        return lambda unread, left: unread <= CATCH_UP or price(-(-unread // CATCH_UP)) <= left * saved

    @property
    def guessing(self) -> bool:
        """Whether requests have draft tokens at present, so that draft models should read their prompts."""
        return self.policy.kind != "off" and not self._plain_steps

    def _draft_cost(self, shapes: Sequence[Shape]) -> float:
        """Return the seconds of drafting trees of these shapes: a pass for each level, over the nodes of that
        level."""
        first = shapes[0] if shapes else PLAIN
        if all(shape is first for shape in shapes):
            return first.depth * self.pass_cost(len(shapes) * first.width, 0)
        widths = sorted((shape.depth, shape.width) for shape in shapes if shape.depth)
        seconds, done, rows = 0.0, 0, sum(width for _, width in widths)
        for depth, width in widths:
            if depth > done:
                seconds += (depth - done) * self.pass_cost(rows, 0)
                done = depth
            rows -= width
        return seconds

    def drafted(self, shapes: Sequence[Shape], catch_up: int, seconds: float) -> None:
        """Record that drafting these shapes took `seconds`, including `catch_up` tokens read before."""
        self.counters.draft_seconds += seconds
        self.drafting_seconds = seconds
        depth = max((shape.depth for shape in shapes), default=0)
        if depth and catch_up <= CATCH_UP + len(shapes):
            rows = sum(shape.width for shape in shapes if shape.depth)
            self.pass_cost.observe(rows, 0, seconds / depth)

    def choose(
        self, trees: Mapping[int, TokenTree], sampled: Mapping[int, bool], plain: int,
        needs: Mapping[int, Need], kv_tokens: int, spent: float, budget: int, asked: Mapping[int, Shape],
    ) -> dict[int, TokenTree]:  # fmt: skip
        """Return the part of each request's tree that is worth verifying.

        * `plain`: query tokens of the step without draft tokens.
        * `needs`: those of all requests that decode in it.
        * `spent`: seconds of drafting.
        * `asked`: the shapes that were requested.
        """
        counters = self.counters
        counters.drafts += len(trees)
        counters.drafted += sum(len(tree) - 1 for tree in trees.values())
        calibrated = {id: self.acceptance.calibrate(tree, sampled[id]) for id, tree in trees.items()}
        self._drafted, self._asked = calibrated, dict(asked)
        judged = calibrated if self.policy.calibrated else trees
        probing = self._plain_steps or self._trial is self._draft_trials
        if probing or not trees:  # a probe is verified at any cost
            return dict(judged)
        drafted = Drafted(
            trees=list(judged.values()),
            needs=[needs[id] for id in judged],
            undrafted=[need for id, need in needs.items() if id not in trees],
            plain=plain,
            spent=spent,
            step=cache(lambda rows: self.step_cost(rows, kv_tokens)),
            budget=budget,
        )
        kept = policies.select(self.policy, drafted)
        pairs = zip(judged.items(), kept, strict=True)
        return {id: tree.keep(nodes) for (id, tree), nodes in pairs if len(nodes) > 1}

    def verified(self, id: int, tree: TokenTree, tokens: Sequence[int], sampled: bool) -> None:
        """Record what the target sampled for a request whose `tree` was verified, even if only its root.
        `tokens` are the accepted path and one more. Draft tokens that were not selected for verification are
        judged by them too: statistics of verified ones alone would overestimate acceptance."""
        drafted = self._drafted.get(id)
        if drafted is not None:
            self.acceptance.learn(drafted, tokens, sampled)
            self._learn_covers(drafted, tokens, self._asked[id])
        if len(tree) == 1:
            return
        counters, accepted = self.counters, len(tokens) - 1
        counters.verified += len(tree) - 1
        counters.accepted += accepted
        self._step_guesses += len(tree) - 1
        self._step_accepted += accepted
        depth = max(tree.depths())
        self._step_tested += min(accepted + 1, depth)
        counters.expected += sum(tree.accept[1:])
        _count(counters.trees_by_nodes, len(tree) - 1)
        _count(counters.trees_by_depth, depth)
        for depth in range(min(accepted, MOST_DEPTH)):
            counters.accepted_at[depth] += 1

    def stepped(self, rows: int, kv_tokens: int, seconds: float, tokens: int = 0) -> None:
        """Record that a step of `rows` query tokens took `seconds` in the executor and yielded `tokens`. Call
        it before `verified`."""
        if self._trial:
            self._trial.found(self.step_cost(rows, kv_tokens), seconds)
            self._trial = None
        self.step_cost.observe(rows, kv_tokens, seconds)
        whole, self.drafting_seconds = seconds + self.drafting_seconds, 0.0
        self._throughput += RECENT * (tokens / whole - self._throughput) if whole > 0 else 0.0
        self._step_guesses = self._step_accepted = self._step_tested = 0

    def report(self) -> SpeculationReport:
        """Return the counters as of now."""
        counts: dict[str, Any] = {
            name: list(count) if isinstance(count, list) else count
            for name, count in vars(self.counters).items()
        }
        return SpeculationReport(**counts)

    def alone(self) -> tuple[float, float, int]:
        """Return, for one request: seconds of drafting a token, the probability that it is accepted, and the
        maximum depth; zeros as long as nothing was drafted."""
        if self.policy.kind == "off" or not self.counters.drafts:
            return 0.0, 0.0, 0
        return self.pass_cost(1, 0), self._covers()[0][0], MOST_DEPTH

    def means(self, kv_tokens: int, others: int) -> Means:
        """Return the present averages of decoding, for steps with `others` further query tokens that read
        `kv_tokens`."""
        depth = SURE_LEVELS if self.policy.kind != "off" and self.counters.drafts else 0
        return Means(
            step=cache(lambda rows: self.step_cost(rows, kv_tokens)),
            draft=lambda requests: self.pass_cost(requests, 0),
            cover=self._covers()[0][0],
            depth=depth,
            others=others,
        )

    def _covers(self) -> list[list[float]]:
        """Return, by width and level, the probability that the next token is among a node's best 1, 2, …
        candidates, given that all tokens above it were accepted. It may rise with the level: a text with long
        accepted paths is easy to draft for."""
        if self._known_covers is None:
            above, levels = list(FIRST_HITS), []
            for hits, tried in zip(self._hits, self._tried, strict=True):
                above = [
                    (hit + DOUBT * known) / (trials + DOUBT)
                    for hit, trials, known in zip(hits, tried, above, strict=True)
                ]
                levels.append([min(total, 0.999) for total in accumulate(above)])
            self._known_covers = [list(widths) for widths in zip(*levels, strict=True)]
        return self._known_covers

    def _learn_covers(self, tree: TokenTree, tokens: Sequence[int], asked: Shape) -> None:
        """Record the levels that `tokens` reach. Nodes that were requested but not drafted count as not
        accepted."""
        path = tree.follow(tokens)
        self._known_covers = None
        for level, parent in enumerate(path[: min(len(tokens), asked.depth, MOST_LEVELS)]):
            tried, hits = self._tried[level], self._hits[level]
            right = path[level + 1] if level + 1 < len(path) else None
            for rank in range(min(asked.width, len(WIDTHS))):
                if tried[rank] > MEMORY:
                    tried[rank] /= 2
                    hits[rank] /= 2
                tried[rank] += 1
            if right is not None:
                rank = tree.parents[:right].count(parent)  # siblings with a higher score
                if rank < len(WIDTHS):
                    hits[rank] += 1


def _prospect(outlook: Outlook, shapes: Sequence[Shape]) -> tuple[float, float, int]:
    """Return the expected tokens, the seconds and the query tokens of drafting and verifying these shapes."""
    tokens = sum(
        expected_by_level(outlook.covers[shape.width - 1], shape.depth) if shape.depth else 1.0
        for shape in shapes
    )
    rows = len(shapes) + outlook.others + sum(shape.nodes for shape in shapes)
    return tokens, outlook.draft(shapes) + outlook.step(rows), rows


def _count(histogram: list[int], number: int) -> None:
    """Count `number` in `histogram[number - 1]`."""
    histogram += [0] * (number - len(histogram))
    histogram[number - 1] += 1


def default_cost(rows: int, kv_tokens: int) -> float:
    """Return a default cost without a profile: relative costs of a machine that computes about 64 query
    tokens in the time it takes to read the weights. Steps correct it from the first one on."""
    return 0.01 * max(1.0, 0.9 + rows / 64) + 1e-7 * kv_tokens
