"""Speculation in the engine: which shapes to ask for, which guesses to verify, and learning from the outcome.

The engine asks `shapes` before drafting, `choose` once the trees are there, and tells `drafted`, `verified`
and `stepped` what happened. policies.py decides; this holds what it decides upon.
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
"""Plain steps after which one request is drafted for, so that what was learned stays true."""
PROBE = Shape(2, 1)
FIRST_HITS = (0.7, 0.08, 0.04, 0.02)
"""How often a node's first, second, … guess is right, as long as nothing is known."""
DRAFT_TRIAL = 64
"""Steps before speculation is tried that pays only if its steps take less than is thought."""
TRIAL_LEVELS = 4
TRIAL_STEPS = 4.0
"""Such a trial is a chain of up to twice so many draft tokens, where present ones are no longer than so many;
its step takes at most so many times the present one, as far as is known."""
TRIAL_GAIN = 1.4
"""Throughput that it must promise, by that of now."""
DOUBT = 20.0
"""Guesses at a level of trees that must be seen before they count as much as what holds a level above."""
MEMORY = 400.0
"""Verified guesses of a level after which older ones fade from what shapes are chosen by."""
RECENT = 0.1
"""Share of the last step in the recent throughput."""
CATCH_UP = 32
"""A draft that first had to read more tokens than this says nothing about the cost of drafting."""


@dataclass
class Counters:
    """What speculation did so far, as in SpeculationReport."""

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
    """The state of one engine's speculation. `prior` is the cost of a step in seconds by rows and KV tokens,
    from a profile or a guess; only ratios matter until steps were timed. `draft` is that of a level of trees
    by rows; without it an eighth of a step is assumed."""

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
        bystanders: Sequence[Need] = (), load: float = 0.0,
    ) -> list[Shape]:  # fmt: skip
        """A shape for each of the decoding requests, within their limits and `nodes` each, in a step of
        `others` rows besides that reads `kv_tokens`; PLAIN where nothing is to be drafted. `bystanders` are
        the needs of those among the others that decode, `load` the share of places taken."""
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
            bystanders=bystanders,
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
        """Whether this step is to be a plain one, to see what those take now: not where speculation would pay
        even if they took a third of what is thought."""
        requests = len(chosen)
        if self.policy.kind != "goodput" or not self._plain_trials.due(requests):
            return False
        tokens, seconds, _ = _prospect(outlook, chosen)
        if tokens / seconds > LIMIT * requests / outlook.step(requests + outlook.others):
            return False
        self._trial = self._plain_trials
        return True

    def _tried_shape(self, outlook: Outlook, chosen: Sequence[Shape], kv_tokens: int) -> Shape:
        """Now and then the shortest chain that would pay more than what is chosen if steps that are not known
        took a third of what is thought; PLAIN where none would, or it is not the time."""
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
        """In a step where so many decode: whether a request of which the draft has `unread` tokens should be
        guessed for, if `left` tokens are expected of it yet: reading takes no longer than guesses should
        save. Only `goodput` asks for the price."""
        if self.policy.kind != "goodput":
            return lambda unread, left: True
        brings = expected_by_level(self._covers()[0], SURE_LEVELS)
        saved = (1 - 1 / brings) * self.step_cost(decoding, kv_tokens) / max(decoding, 1)
        price = cache(lambda stretches: self.pass_cost(stretches * CATCH_UP, 0))  # often the same, for many
        return lambda unread, left: unread <= CATCH_UP or price(-(-unread // CATCH_UP)) <= left * saved

    @property
    def guessing(self) -> bool:
        """Whether requests are guessed for these days: then drafts should know their prompts."""
        return self.policy.kind != "off" and not self._plain_steps

    def _draft_cost(self, shapes: Sequence[Shape]) -> float:
        """What drafting trees of these shapes takes: a pass a level, over the nodes of that level."""
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
        """Take in that drafting these shapes took `seconds`, `catch_up` tokens read before."""
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
        """The part of each request's tree that is worth verifying. `plain` rows are in the step without any;
        `needs` are those of all requests that decode in it; `spent` seconds went into drafting. `asked` are
        the shapes that were asked for."""
        counters = self.counters
        counters.drafts += len(trees)
        counters.drafted += sum(len(tree) - 1 for tree in trees.values())
        calibrated = {id: self.acceptance.calibrate(tree, sampled[id]) for id, tree in trees.items()}
        self._drafted, self._asked = calibrated, dict(asked)
        judged = calibrated if self.policy.calibrated else trees
        probing = self._plain_steps or self._trial is self._draft_trials
        if probing or not trees:  # a probe is verified whatever it costs
            return dict(judged)
        drafted = Drafted(
            trees=list(judged.values()),
            needs=[needs[id] for id in judged],
            bystanders=[need for id, need in needs.items() if id not in trees],
            plain=plain,
            spent=spent,
            step=cache(lambda rows: self.step_cost(rows, kv_tokens)),
            budget=budget,
        )
        kept = policies.select(self.policy, drafted)
        pairs = zip(judged.items(), kept, strict=True)
        return {id: tree.keep(nodes) for (id, tree), nodes in pairs if len(nodes) > 1}

    def verified(self, id: int, tree: TokenTree, tokens: Sequence[int], sampled: bool) -> None:
        """Take in what the target chose for a request whose `tree` was verified, if only its root: `tokens`,
        the last of them beyond the accepted path. Guesses that were drafted but not verified are judged by
        them too: who looked at verified ones alone would think better of guesses than they are."""
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
        """Take in that a step of so many rows took `seconds` in the executor and brought `tokens`; comes
        before `verified`."""
        if self._trial:
            self._trial.found(self.step_cost(rows, kv_tokens), seconds)
            self._trial = None
        self.step_cost.observe(rows, kv_tokens, seconds)
        whole, self.drafting_seconds = seconds + self.drafting_seconds, 0.0
        self._throughput += RECENT * (tokens / whole - self._throughput) if whole > 0 else 0.0
        self._step_guesses = self._step_accepted = self._step_tested = 0

    def report(self) -> SpeculationReport:
        """The counters now."""
        counts: dict[str, Any] = {
            name: list(count) if isinstance(count, list) else count
            for name, count in vars(self.counters).items()
        }
        return SpeculationReport(**counts)

    def alone(self) -> tuple[float, float, int]:
        """For one request: seconds of drafting a guess, the chance that it is right, and how many are made
        at most; nothing as long as nothing was drafted."""
        if self.policy.kind == "off" or not self.counters.drafts:
            return 0.0, 0.0, 0
        return self.pass_cost(1, 0), self._covers()[0][0], MOST_DEPTH

    def means(self, kv_tokens: int, others: int) -> Means:
        """What decoding takes and brings these days, in steps of `others` rows besides that read so much."""
        depth = SURE_LEVELS if self.policy.kind != "off" and self.counters.drafts else 0
        return Means(
            step=cache(lambda rows: self.step_cost(rows, kv_tokens)),
            draft=lambda requests: self.pass_cost(requests, 0),
            cover=self._covers()[0][0],
            depth=depth,
            others=others,
        )

    def _covers(self) -> list[list[float]]:
        """The chance, by number of guesses and level, that the next token is among a node's best 1, 2, …,
        given that all above it were right: who is right for long is easy to guess for."""
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
        """What was asked for, but not thought worth guessing, was not guessed right."""
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
                rank = tree.parents[:right].count(parent)  # siblings that were thought likelier
                if rank < len(WIDTHS):
                    hits[rank] += 1


def _prospect(outlook: Outlook, shapes: Sequence[Shape]) -> tuple[float, float, int]:
    """Of drafting and verifying these shapes: expected tokens, seconds, and query tokens of the step."""
    tokens = sum(
        expected_by_level(outlook.covers[shape.width - 1], shape.depth) if shape.depth else 1.0
        for shape in shapes
    )
    rows = len(shapes) + outlook.others + sum(shape.nodes for shape in shapes)
    return tokens, outlook.draft(shapes) + outlook.step(rows), rows


def _count(histogram: list[int], number: int) -> None:
    """One more that is `number`, which is counted in `histogram[number - 1]`."""
    histogram += [0] * (number - len(histogram))
    histogram[number - 1] += 1


def guessed_cost(rows: int, kv_tokens: int) -> float:
    """Where there is no profile: relative costs of a machine that can compute some 64 rows in the time it
    takes to read the weights. Steps correct it from the first one on."""
    return 0.01 * max(1.0, 0.9 + rows / 64) + 1e-7 * kv_tokens
