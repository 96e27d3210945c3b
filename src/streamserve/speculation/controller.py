"""The speculation controller: chooses shapes to draft and draft tokens to verify, and learns from the
results.

begin ── Round.shapes ──▶ drafter ── trees ──▶ Round.select ──▶ verification ── results ──▶ Round.learn

A `Round` has the state of one step, `Speculation` the state learned over steps. The policy decides;
exploration.py deviates from its decisions at intervals, to keep the statistics current.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from streamserve.contracts.tree import TokenTree
from streamserve.protocol.reports import SpeculationReport
from streamserve.speculation.acceptance import Acceptance
from streamserve.speculation.exploration import Exploration
from streamserve.speculation.guard import Mode, ThroughputGuard
from streamserve.speculation.learned_cost import RefinedCost
from streamserve.speculation.level_acceptance import LevelAcceptance
from streamserve.speculation.outlook import RELIABLE_LEVELS, Candidate, DraftedStep, Means, Outlook
from streamserve.speculation.policies import MAX_DEPTH, SpeculationPolicy, whole_trees
from streamserve.speculation.shapes import PLAIN, Seconds, TreeShape, expected_by_level, fit
from streamserve.speculation.slo import LatencyRequirement
from streamserve.speculation.trials import Trials

RECENT = 0.1
"""Weight of the last step in the recent throughput."""
FEWEST_BETWEEN = 8
MOST_BETWEEN = 64
"""Minimum and maximum of plain steps between two decisions of the policy, where steps run ahead. Every second
decision against draft tokens doubles them: a step that waits for a decision leaves the device idle."""
FLAT = 1.2
"""Maximum seconds of a step, relative to a plain one, in which trees are verified as a whole before they are
known: selecting nodes could save little."""
CATCH_UP = 32
"""Drafting that first had to read more tokens than this is no measurement of the cost of drafting."""


@dataclass
class SpeculationCounters:
    """Totals of speculation so far, as in SpeculationReport. A verified tree is counted by `Round.learn`, its
    accepted tokens when they become outputs."""

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

    def count(self, tree: TokenTree, depth: int) -> None:
        """Count a verified tree of `depth` levels."""
        self.verified += len(tree) - 1
        self.expected += sum(tree.accept[1:])
        _count(self.trees_by_nodes, len(tree) - 1)
        _count(self.trees_by_depth, depth)

    def accept(self, accepted: int) -> None:
        """Count the `accepted` draft tokens of a tree, which became outputs."""
        self.accepted += accepted
        for level in range(min(accepted, MAX_DEPTH)):
            self.accepted_at[level] += 1


class Verification(NamedTuple):
    """Numbers of draft tokens of one step: verified, accepted, and tested (up to the first rejected one)."""

    draft_tokens: int = 0
    accepted: int = 0
    tested: int = 0


NOTHING_VERIFIED = Verification()


class SpeculationBatch(NamedTuple):
    """A planned step for which the policy has not chosen draft tokens yet.

    * `candidates`: the decoding requests that may have draft tokens.
    * `requirements`: the latency requirements of all decoding requests, by id, in service order.
    * `query_tokens`: query tokens of the step without draft tokens. `kv_tokens`: KV tokens that it reads.
    * `nodes`: maximum draft tokens of each request. `budget`: maximum draft tokens of all requests together.
    * `load`: the share of sequence slots that are taken.
    """

    candidates: Sequence[Candidate]
    requirements: Mapping[int, LatencyRequirement]
    query_tokens: int
    kv_tokens: int
    nodes: int
    budget: int
    load: float = 0.0


NO_CANDIDATES = SpeculationBatch((), {}, 0, 0, 0, 0)


class MeasuredStep(NamedTuple):
    """An executed step, which took `seconds` in the executor and yielded `tokens` output tokens.

    * `verified`: for each request with a tree in `Round.drafted` its id, the verified part of the tree
      (perhaps only the root), and the target's tokens (the accepted path and one more).
    * `interval`: seconds since the end of the step before, if both steps had decoding requests alone, and
      this one no others; otherwise None. `decoding`: number of requests.
    * `ahead`: whether the step was launched before the results of the step before it were known.
    """

    query_tokens: int
    kv_tokens: int
    seconds: float
    tokens: int = 0
    verified: Sequence[tuple[int, TokenTree, Sequence[int]]] = ()
    interval: float | None = None
    decoding: int = 0
    ahead: bool = False


class Speculation:
    """The speculation state that one engine has learned over its steps. `prior` returns the seconds of a step
    by query tokens and KV tokens, from a profile or a default; until steps are timed, only ratios matter.
    `draft` returns the seconds of one tree level by its number of nodes; by default an eighth of a step."""

    def __init__(
        self,
        policy: SpeculationPolicy,
        prior: Callable[[int, int], float],
        draft: Callable[[float], float] | None = None,
    ) -> None:
        self.policy = policy
        self.policy_state = policy.state
        self.counters = SpeculationCounters()
        self.acceptance = Acceptance()
        self.level_acceptance = LevelAcceptance()
        self.exploration = Exploration(trials=policy.weighs_costs)
        self.guard = ThroughputGuard()
        """Suppresses the draft tokens of policies that weigh costs."""
        self.step_cost = RefinedCost(prior)
        self.pass_cost = RefinedCost(
            lambda tokens, kv_tokens: draft(tokens) if draft else self.step_cost(tokens, kv_tokens) / 8
        )
        self.throughput = 0.0
        """Recent tokens a second."""
        self.last = NOTHING_VERIFIED
        """The verification of the last step."""

    def begin(self, batch: SpeculationBatch) -> "Round":
        """Begin the speculation of one step."""
        return Round(self, batch)

    def worth_catching_up(self, decoding: int, kv_tokens: int) -> Callable[[int, float], bool]:
        """Return a function that decides whether to draft for a request whose draft model has `unread` tokens
        to read and whose output is expected to have `left` more tokens. In a batch of `decoding` sequences,
        the reading must take no longer than draft tokens should save. Policies that do not weigh costs always
        draft."""
        if not self.policy.weighs_costs:
            return lambda unread, left: True
        expected = expected_by_level(self.level_acceptance.by_width()[0], RELIABLE_LEVELS)
        saved_seconds = (1 - 1 / expected) * self.step_cost(decoding, kv_tokens) / max(decoding, 1)
        catch_up_seconds = cache(lambda chunks: self.pass_cost(chunks * CATCH_UP, 0))  # requests share values
        return lambda unread, left: (
            unread <= CATCH_UP or catch_up_seconds(-(-unread // CATCH_UP)) <= left * saved_seconds
        )

    @property
    def is_drafting(self) -> bool:
        """Whether requests have draft tokens at present; if so, draft models should read prompts."""
        return self.policy.drafts and not (self.exploration.plain_steps or self.guard.suppressing)

    @property
    def steps_between(self) -> int:
        """Number of plain steps after which the policy is to be asked again."""
        if self.guard.suppressing:
            return MOST_BETWEEN
        return min(MOST_BETWEEN, FEWEST_BETWEEN << min(self.exploration.plain_steps // 2, MOST_BETWEEN))

    def draft_cost(self, shapes: Sequence[TreeShape]) -> float:
        """Return the seconds of drafting trees of these shapes: one pass over all nodes of each level."""
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

    def report(self) -> SpeculationReport:
        """Return the counters as of now."""
        counts: dict[str, Any] = {
            name: list(count) if isinstance(count, list) else count
            for name, count in vars(self.counters).items()
        }
        return SpeculationReport(**counts)

    def means(self, kv_tokens: int, max_depth: int) -> Means:
        """Return the present averages of decoding, for steps that read `kv_tokens`. Draft chains have up to
        `max_depth` tokens; as long as nothing was drafted, 0."""
        return Means(
            step=cache(lambda query_tokens: self.step_cost(query_tokens, kv_tokens)),
            draft=lambda requests: self.pass_cost(requests, 0),
            acceptance=self.level_acceptance.by_width()[0][0],
            depth=max_depth if self.policy.drafts and self.counters.drafts else 0,
        )


class CalibratedDraft(NamedTuple):
    """A drafted tree with calibrated acceptance, its requested shape, and whether the request is sampled."""

    tree: TokenTree
    requested: TreeShape
    sampled: bool


class Round:
    """The speculation of one step. `select` is only for steps with draft tokens, `learn` for executed
    ones."""

    def __init__(self, speculation: Speculation, batch: SpeculationBatch) -> None:
        self._speculation = speculation
        self._batch = batch
        self._trials: Trials | None = None
        self._verify_all = False
        self._drafted_as_usual = True
        self._step: Seconds
        self.shapes = self._choose_shapes()
        """A shape for each candidate, within the candidate's limits; PLAIN if nothing is to be drafted."""
        self.drafted: dict[int, CalibratedDraft] = {}
        self.drafting_seconds = 0.0

    def _choose_shapes(self) -> list[TreeShape]:
        candidates, speculation = self._batch.candidates, self._speculation
        if not (speculation.policy.drafts and candidates) or self._refused():
            return [PLAIN] * len(candidates)
        kv_tokens, step_cost = self._batch.kv_tokens, speculation.step_cost
        self._step = cache(lambda query_tokens: step_cost(query_tokens, kv_tokens))
        outlook = self._outlook()
        proposed, speculation.policy_state = speculation.policy.shapes(outlook, speculation.policy_state)
        proposed = [
            fit(shape, candidate.depth, min(candidate.nodes, outlook.nodes))
            for shape, candidate in zip(proposed, candidates, strict=True)
        ]
        if not self._allowed(proposed):
            return [PLAIN] * len(candidates)
        shapes, self._trials, self._verify_all = speculation.exploration.explore(
            outlook, proposed, lambda query_tokens: step_cost.lower_bound(query_tokens, kv_tokens)
        )
        return shapes

    def _refused(self) -> bool:
        """Return whether the guard refuses draft tokens without asking the policy for a proposal."""
        speculation = self._speculation
        return speculation.policy.weighs_costs and speculation.guard.refuses(len(self._batch.requirements))

    def _allowed(self, proposed: Sequence[TreeShape]) -> bool:
        """Return whether the throughput guard allows the proposed shapes."""
        speculation = self._speculation
        guarded = speculation.policy.weighs_costs and any(shape.depth for shape in proposed)
        return not guarded or speculation.guard.allows(len(self._batch.requirements))

    def _outlook(self) -> Outlook:
        batch, speculation, last = self._batch, self._speculation, self._speculation.last
        return Outlook(
            candidates=batch.candidates,
            others=batch.query_tokens - len(batch.candidates),
            step=self._step,
            draft=speculation.draft_cost,
            level_acceptance=speculation.level_acceptance.by_width(),
            nodes=max(batch.nodes, 0),
            undrafted=self._undrafted({candidate.id for candidate in batch.candidates}),
            load=batch.load,
            acceptance=last.accepted / last.draft_tokens if last.draft_tokens else None,
            accepted=last.accepted,
            tested=last.tested,
            throughput=speculation.throughput,
        )

    def _undrafted(self, drafted: Collection[int]) -> list[LatencyRequirement]:
        """Return the requirements of the decoding requests whose ids are not in `drafted`."""
        requirements = self._batch.requirements
        if len(requirements) == len(drafted):
            return []
        return [requirement for id, requirement in requirements.items() if id not in drafted]

    def select(
        self, trees: Mapping[int, TokenTree], requested: Sequence[TreeShape], catch_up: int, seconds: float
    ) -> dict[int, TokenTree]:
        """Return the part of each request's tree that is worth verifying, by request id. `requested` has a
        shape for each candidate. Drafting took `seconds`, in which the drafter also read `catch_up`
        tokens."""
        self.record_drafting(trees, requested, catch_up, seconds)
        if not trees:
            return {}
        batch, policy = self._batch, self._speculation.policy
        judged = trees
        if policy.calibrated:
            judged = {id: draft.tree for id, draft in self.drafted.items()}
        if self._verify_all:
            return dict(judged)
        drafted = DraftedStep(
            trees=list(judged.values()),
            requirements=[batch.requirements[id] for id in judged],
            undrafted=self._undrafted(trees),
            plain=batch.query_tokens,
            spent=seconds,
            step=self._step,
            budget=batch.budget,
        )
        selected = policy.select(drafted)
        pairs = zip(judged.items(), selected, strict=True)
        return {id: tree.keep(nodes) for (id, tree), nodes in pairs if len(nodes) > 1}

    def verifies_all(self, requested: Sequence[TreeShape]) -> bool:
        """Return whether trees of the `requested` shapes are verified as a whole, whatever their tokens. Then
        a step can be launched before the trees are known."""
        speculation, batch = self._speculation, self._batch
        if self._verify_all or speculation.policy.select is whole_trees:
            return True
        targets = any(requirement.tpot is not None for requirement in batch.requirements.values())
        plain, nodes = batch.query_tokens, sum(shape.nodes for shape in requested)
        cheap = nodes <= batch.budget and self._step(plain + nodes) <= FLAT * self._step(plain)
        return speculation.policy.weighs_costs and cheap and not targets

    def known(self, id: int, tree: TokenTree) -> TokenTree:
        """Return a verified tree with its tokens; they are negative if it was verified before it was
        known."""
        draft = self.drafted.get(id)
        if draft is None or all(token >= 0 for token in tree.tokens):
            return tree
        return draft.tree.keep(range(min(len(draft.tree), len(tree))))

    def record_drafting(
        self, trees: Mapping[int, TokenTree], requested: Sequence[TreeShape], catch_up: int, seconds: float
    ) -> None:
        """Record drafted `trees` and their cost, as `select` does. To be called for trees that were verified
        without `select`."""
        speculation, candidates = self._speculation, self._batch.candidates
        counters, calibrate = speculation.counters, speculation.acceptance.calibrate
        counters.draft_seconds += seconds
        counters.drafts += len(trees)
        counters.drafted += sum(len(tree) - 1 for tree in trees.values())
        self.drafting_seconds = seconds
        self._drafted_as_usual = seconds > 0 and catch_up <= CATCH_UP + sum(1 + s.depth for s in requested)
        depth = max((shape.depth for shape in requested), default=0)
        if depth and catch_up <= CATCH_UP + len(requested):
            query_tokens = sum(shape.width for shape in requested if shape.depth)
            speculation.pass_cost.observe(query_tokens, 0, seconds / depth)
        requests = {
            candidate.id: (shape, candidate.sampled)
            for candidate, shape in zip(candidates, requested, strict=True)
        }
        for id, tree in trees.items():
            shape, sampled = requests[id]
            self.drafted[id] = CalibratedDraft(calibrate(tree, sampled), shape, sampled)

    def learn(self, step: MeasuredStep) -> None:
        """Learn costs and acceptance from the executed step. The target's tokens judge all draft tokens, not
        only tokens selected for verification: their statistics alone would overestimate acceptance."""
        speculation = self._speculation
        if self._trials:
            self._trials.record(speculation.step_cost(step.query_tokens, step.kv_tokens), step.seconds)
        speculation.step_cost.observe(step.query_tokens, step.kv_tokens, step.seconds)
        total = step.seconds + self.drafting_seconds
        if total > 0:
            speculation.throughput += RECENT * (step.tokens / total - speculation.throughput)
        speculation.last = self._learn_acceptance(step) if step.verified else NOTHING_VERIFIED
        if step.interval is not None:
            plain = Mode.AHEAD if step.ahead else Mode.PLAIN
            mode = Mode.SPECULATING if self.drafted else plain
            if self._drafted_as_usual:
                speculation.guard.observe(step.decoding, mode, step.tokens, step.interval)
            elif self.drafting_seconds:
                speculation.guard.count_loss(step.decoding, step.tokens, step.interval)

    def _learn_acceptance(self, step: MeasuredStep) -> Verification:
        speculation = self._speculation
        draft_tokens = total_accepted = tested = 0
        for id, tree, tokens in step.verified:
            draft, accepted = self.drafted[id], len(tokens) - 1
            speculation.acceptance.learn(draft.tree, tokens, draft.sampled)
            speculation.level_acceptance.learn(draft.tree, tokens, draft.requested)
            if len(tree) > 1:
                depth = max(tree.depths())
                speculation.counters.count(tree, depth)
                draft_tokens += len(tree) - 1
                total_accepted += accepted
                tested += min(accepted + 1, depth)
        return Verification(draft_tokens, total_accepted, tested)


def _count(histogram: list[int], number: int) -> None:
    """Increment `histogram[number - 1]`, extending the histogram if necessary."""
    histogram += [0] * (number - len(histogram))
    histogram[number - 1] += 1


def default_cost(query_tokens: int, kv_tokens: int) -> float:
    """Return the seconds of a step that are assumed without a profile: relative costs of a machine that
    computes about 64 query tokens in the time of reading the weights. Measured steps soon correct them."""
    return 0.01 * max(1.0, 0.9 + query_tokens / 64) + 1e-7 * kv_tokens
