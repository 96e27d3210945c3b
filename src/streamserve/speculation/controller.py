"""The speculation controller: chooses shapes to draft and draft tokens to verify, and learns from the
results.

The engine calls `shapes` before drafting, `choose` once the trees have arrived, and `record_drafting`,
`record_step` and `record_verification` with the results. policies.py decides; this module keeps the
statistics it decides by.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

from streamserve.protocol.reports import SpeculationReport
from streamserve.speculation import policies
from streamserve.speculation.acceptance import Acceptance
from streamserve.speculation.goodput import MAX_LEVELS, WIDTHS
from streamserve.speculation.learned_cost import LIMIT, RefinedCost
from streamserve.speculation.outlook import RELIABLE_LEVELS, Candidate, DraftedStep, Means, Outlook
from streamserve.speculation.policies import MAX_DEPTH, SpeculationPolicy
from streamserve.speculation.shapes import PLAIN, Shape, expected_by_level, fit
from streamserve.speculation.slo import LatencyRequirement
from streamserve.speculation.specustream import Flow
from streamserve.speculation.tree import TokenTree
from streamserve.speculation.trials import Trials

PROBE_EVERY = 64
"""Plain steps after which one request gets draft tokens, so that the statistics stay current."""
PROBE = Shape(2, 1)
INITIAL_ACCEPTANCE = (0.7, 0.08, 0.04, 0.02)
"""Initial probability that a node's first, second, … candidate token is accepted."""
DRAFT_TRIAL = 64
"""Steps before a trial of speculation that only pays if its steps are cheaper than estimated."""
TRIAL_LEVELS = 4
TRIAL_STEPS = 4.0
"""Such a trial is a chain of up to twice TRIAL_LEVELS draft tokens, made where present chains have at most
TRIAL_LEVELS. Its step takes at most TRIAL_STEPS times the present one, as far as is known."""
TRIAL_GAIN = 1.4
"""Throughput that a trial must promise, relative to the present one."""
PRIOR_WEIGHT = 20.0
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
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)
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
        self.pass_cost = RefinedCost(
            lambda tokens, kv_tokens: draft(tokens) if draft else self.step_cost(tokens, kv_tokens) / 8
        )
        self._tried = [[0.0] * len(WIDTHS) for _ in range(MAX_LEVELS)]
        self._hits = [[0.0] * len(WIDTHS) for _ in range(MAX_LEVELS)]
        self._known_level_acceptance: list[list[float]] | None = None
        self._requested: dict[int, Shape] = {}
        self._plain_steps = 0
        self._plain_trials, self._draft_trials = Trials(), Trials(DRAFT_TRIAL)
        self._trial: Trials | None = None
        self._drafted: dict[int, TokenTree] = {}
        self._flow = Flow()
        self.drafting_seconds = 0.0
        self._throughput = 0.0
        self._step_draft_tokens = self._step_accepted = self._step_tested = 0

    def shapes(
        self, candidates: Sequence[Candidate], others: int, kv_tokens: int, nodes: int,
        undrafted: Sequence[LatencyRequirement] = (), load: float = 0.0,
    ) -> list[Shape]:  # fmt: skip
        """Return a shape for each decoding request, within its limits and `nodes` draft tokens each; PLAIN
        where nothing is to be drafted. The step has `others` further query tokens and reads `kv_tokens`.
        `undrafted` are the requirements of decoding requests without draft tokens, `load` the share of
        sequence slots taken."""
        self._drafted = {}
        if self.policy.kind == "off" or not candidates:
            return [PLAIN] * len(candidates)
        outlook = Outlook(
            candidates=candidates,
            others=others,
            step=cache(lambda query_tokens: self.step_cost(query_tokens, kv_tokens)),
            draft=self._draft_cost,
            level_acceptance=self._level_acceptance(),
            nodes=max(nodes, 0),
            undrafted=undrafted,
            load=load,
            acceptance=self._step_accepted / self._step_draft_tokens if self._step_draft_tokens else None,
            accepted=self._step_accepted,
            tested=self._step_tested,
            throughput=self._throughput,
        )
        proposed, self._flow = policies.shapes(self.policy, outlook, self._flow)
        chosen = [
            fit(shape, candidate.depth, min(candidate.nodes, outlook.nodes))
            for shape, candidate in zip(proposed, candidates, strict=True)
        ]
        if any(shape.depth for shape in chosen):
            self._plain_steps = 0
            if self._tries_plain(outlook, chosen):
                return [PLAIN] * len(candidates)
        else:
            self._plain_steps += 1
        if (shape := self._tried_shape(outlook, chosen, kv_tokens)).depth:
            return [
                fit(shape, candidate.depth, min(candidate.nodes, outlook.nodes)) for candidate in candidates
            ]
        if not self._plain_steps or self._plain_steps % PROBE_EVERY:
            return chosen
        number = self._plain_steps // PROBE_EVERY % len(candidates)
        return [
            fit(PROBE, candidate.depth, candidate.nodes) if i == number else PLAIN
            for i, candidate in enumerate(candidates)
        ]

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
            trial_tokens, trial_seconds, query_tokens = _prospect(outlook, [shape] * requests)
            if outlook.step(query_tokens) > TRIAL_STEPS * outlook.step(now):
                break
            trial_seconds += self.step_cost.lower_bound(query_tokens, kv_tokens) - outlook.step(query_tokens)
            if trial_tokens / trial_seconds >= TRIAL_GAIN * tokens / seconds:
                self._trial = self._draft_trials
                return shape
        return PLAIN

    def worth_catching_up(self, decoding: int, kv_tokens: int) -> Callable[[int, float], bool]:
        """Return, for a step with `decoding` sequences, a function that tells whether to draft for a request
        of which the draft model has `unread` tokens to read and `left` output tokens are expected: the
        reading must take no longer than draft tokens should save. Policies other than `goodput` always
        draft."""
        if self.policy.kind != "goodput":
            return lambda unread, left: True
        expected = expected_by_level(self._level_acceptance()[0], RELIABLE_LEVELS)
        saved_seconds = (1 - 1 / expected) * self.step_cost(decoding, kv_tokens) / max(decoding, 1)
        catch_up_seconds = cache(lambda chunks: self.pass_cost(chunks * CATCH_UP, 0))  # requests share values
        return lambda unread, left: (
            unread <= CATCH_UP or catch_up_seconds(-(-unread // CATCH_UP)) <= left * saved_seconds
        )

    @property
    def is_drafting(self) -> bool:
        """Whether requests have draft tokens at present, so that draft models should read their prompts."""
        return self.policy.kind != "off" and not self._plain_steps

    def _draft_cost(self, shapes: Sequence[Shape]) -> float:
        """Return the seconds of drafting trees of these shapes: a pass for each level, over the nodes of that
        level."""
        first = shapes[0] if shapes else PLAIN
        if all(shape is first for shape in shapes):
            return first.depth * self.pass_cost(len(shapes) * first.width, 0)
        widths = sorted((shape.depth, shape.width) for shape in shapes if shape.depth)
        seconds, done, query_tokens = 0.0, 0, sum(width for _, width in widths)
        for depth, width in widths:
            if depth > done:
                seconds += (depth - done) * self.pass_cost(query_tokens, 0)
                done = depth
            query_tokens -= width
        return seconds

    def record_drafting(self, shapes: Sequence[Shape], catch_up: int, seconds: float) -> None:
        """Record that drafting these shapes took `seconds`, including `catch_up` tokens read before."""
        self.counters.draft_seconds += seconds
        self.drafting_seconds = seconds
        depth = max((shape.depth for shape in shapes), default=0)
        if depth and catch_up <= CATCH_UP + len(shapes):
            query_tokens = sum(shape.width for shape in shapes if shape.depth)
            self.pass_cost.observe(query_tokens, 0, seconds / depth)

    def choose(
        self, trees: Mapping[int, TokenTree], sampled: Mapping[int, bool], plain: int,
        requirements: Mapping[int, LatencyRequirement], kv_tokens: int, spent: float, budget: int,
        requested: Mapping[int, Shape],
    ) -> dict[int, TokenTree]:  # fmt: skip
        """Return the part of each request's tree that is worth verifying.

        * `plain`: query tokens of the step without draft tokens.
        * `requirements`: those of all requests that decode in it.
        * `spent`: seconds of drafting.
        * `requested`: the shapes that were requested.
        """
        counters = self.counters
        counters.drafts += len(trees)
        counters.drafted += sum(len(tree) - 1 for tree in trees.values())
        calibrated = {id: self.acceptance.calibrate(tree, sampled[id]) for id, tree in trees.items()}
        self._drafted, self._requested = calibrated, dict(requested)
        judged = calibrated if self.policy.calibrated else trees
        probing = self._plain_steps or self._trial is self._draft_trials
        if probing or not trees:  # a probe is verified at any cost
            return dict(judged)
        drafted = DraftedStep(
            trees=list(judged.values()),
            requirements=[requirements[id] for id in judged],
            undrafted=[requirement for id, requirement in requirements.items() if id not in trees],
            plain=plain,
            spent=spent,
            step=cache(lambda query_tokens: self.step_cost(query_tokens, kv_tokens)),
            budget=budget,
        )
        selected = policies.select(self.policy, drafted)
        pairs = zip(judged.items(), selected, strict=True)
        return {id: tree.keep(nodes) for (id, tree), nodes in pairs if len(nodes) > 1}

    def record_verification(self, id: int, tree: TokenTree, tokens: Sequence[int], sampled: bool) -> None:
        """Record what the target sampled for a request whose `tree` was verified, even if only its root.
        `tokens` are the accepted path and one more. Draft tokens that were not selected for verification are
        judged by them too: statistics of verified ones alone would overestimate acceptance."""
        drafted = self._drafted.get(id)
        if drafted is not None:
            self.acceptance.learn(drafted, tokens, sampled)
            self._learn_level_acceptance(drafted, tokens, self._requested[id])
        if len(tree) == 1:
            return
        counters, accepted = self.counters, len(tokens) - 1
        counters.verified += len(tree) - 1
        counters.accepted += accepted
        self._step_draft_tokens += len(tree) - 1
        self._step_accepted += accepted
        depth = max(tree.depths())
        self._step_tested += min(accepted + 1, depth)
        counters.expected += sum(tree.accept[1:])
        _count(counters.trees_by_nodes, len(tree) - 1)
        _count(counters.trees_by_depth, depth)
        for depth in range(min(accepted, MAX_DEPTH)):
            counters.accepted_at[depth] += 1

    def record_step(self, query_tokens: int, kv_tokens: int, seconds: float, tokens: int = 0) -> None:
        """Record that a step of so many query tokens took `seconds` in the executor and yielded `tokens`.
        Call it before `record_verification`."""
        if self._trial:
            self._trial.record(self.step_cost(query_tokens, kv_tokens), seconds)
            self._trial = None
        self.step_cost.observe(query_tokens, kv_tokens, seconds)
        total, self.drafting_seconds = seconds + self.drafting_seconds, 0.0
        self._throughput += RECENT * (tokens / total - self._throughput) if total > 0 else 0.0
        self._step_draft_tokens = self._step_accepted = self._step_tested = 0

    def report(self) -> SpeculationReport:
        """Return the counters as of now."""
        counts: dict[str, Any] = {
            name: list(count) if isinstance(count, list) else count
            for name, count in vars(self.counters).items()
        }
        return SpeculationReport(**counts)

    def means(self, kv_tokens: int, max_depth: int) -> Means:
        """Return the present averages of decoding, for steps that read `kv_tokens` and chains of up to
        `max_depth` draft tokens; of none as long as nothing was drafted."""
        return Means(
            step=cache(lambda query_tokens: self.step_cost(query_tokens, kv_tokens)),
            draft=lambda requests: self.pass_cost(requests, 0),
            acceptance=self._level_acceptance()[0][0],
            depth=max_depth if self.policy.kind != "off" and self.counters.drafts else 0,
        )

    def _level_acceptance(self) -> list[list[float]]:
        """Return, by width and level, the probability that the next token is among a node's best 1, 2, …
        candidates, given that all tokens above it were accepted. It may rise with the level: a text with long
        accepted paths is easy to draft for."""
        if self._known_level_acceptance is None:
            prior_level, levels = list(INITIAL_ACCEPTANCE), []
            for hits, tried in zip(self._hits, self._tried, strict=True):
                prior_level = [
                    (hit + PRIOR_WEIGHT * prior) / (trials + PRIOR_WEIGHT)
                    for hit, trials, prior in zip(hits, tried, prior_level, strict=True)
                ]
                levels.append([min(total, 0.999) for total in accumulate(prior_level)])
            self._known_level_acceptance = [list(widths) for widths in zip(*levels, strict=True)]
        return self._known_level_acceptance

    def _learn_level_acceptance(self, tree: TokenTree, tokens: Sequence[int], requested: Shape) -> None:
        """Record the levels that `tokens` reach. Nodes that were requested but not drafted count as not
        accepted."""
        path = tree.follow(tokens)
        self._known_level_acceptance = None
        for level, parent in enumerate(path[: min(len(tokens), requested.depth, MAX_LEVELS)]):
            tried, hits = self._tried[level], self._hits[level]
            child = path[level + 1] if level + 1 < len(path) else None
            for rank in range(min(requested.width, len(WIDTHS))):
                if tried[rank] > MEMORY:
                    tried[rank] /= 2
                    hits[rank] /= 2
                tried[rank] += 1
            if child is not None:
                rank = tree.parents[:child].count(parent)  # siblings with a higher score
                if rank < len(WIDTHS):
                    hits[rank] += 1


def _prospect(outlook: Outlook, shapes: Sequence[Shape]) -> tuple[float, float, int]:
    """Return the expected tokens, the seconds and the query tokens of drafting and verifying these shapes."""
    tokens = sum(
        expected_by_level(outlook.level_acceptance[shape.width - 1], shape.depth) if shape.depth else 1.0
        for shape in shapes
    )
    query_tokens = len(shapes) + outlook.others + sum(shape.nodes for shape in shapes)
    return tokens, outlook.draft(shapes) + outlook.step(query_tokens), query_tokens


def _count(histogram: list[int], number: int) -> None:
    """Count `number` in `histogram[number - 1]`."""
    histogram += [0] * (number - len(histogram))
    histogram[number - 1] += 1


def default_cost(query_tokens: int, kv_tokens: int) -> float:
    """Return a default cost without a profile: relative costs of a machine that computes about 64 query
    tokens in the time it takes to read the weights. Steps correct it from the first one on."""
    return 0.01 * max(1.0, 0.9 + query_tokens / 64) + 1e-7 * kv_tokens
