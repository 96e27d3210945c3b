"""The arrays of a decoding step that are updated from the previous step's arrays equal arrays that are built
from scratch."""

import random
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamserve.contracts.plan import UNKNOWN_TOKEN, SequenceState, Span
from streamserve.contracts.tree import TokenTree, root
from streamserve.execution.backends.cuda.attention import plan_attention
from streamserve.execution.backends.cuda.decoding import Decoding, DecodingStep
from streamserve.execution.backends.cuda.draws import Draw, pack_draws, pack_params
from streamserve.execution.backends.cuda.passes import forward_arrays, sample_arrays
from streamserve.execution.compute.branches import ActiveSequence, new_sequence
from streamserve.execution.compute.sampling import NOT_FINITE
from streamserve.execution.model.layout import Layout, lay_out
from streamserve.protocol.sampling import SamplingParams

SIZE = 4
WINDOWS = (None, 7)
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Life:
    """A sequence in a random run: the executor's state, and its KV."""

    id: int
    choice: int
    state: ActiveSequence
    start: int
    blocks: list[int]

    def span(self, rng: random.Random, fresh: count, follows: bool, draft: int = 0) -> Span:
        """Return the next span: one token, sometimes with draft tokens."""
        while len(self.blocks) * SIZE <= self.start + draft:
            self.blocks.append(next(fresh))
        token = UNKNOWN_TOKEN if follows else rng.randrange(9)
        tree = root(token)
        if draft:
            tree = TokenTree(
                (token, *range(draft)), (-1, *range(draft)), (0.0,) * (1 + draft), (1.0,) * (1 + draft)
            )
        spare = rng.randrange(2)
        blocks = self.blocks + [next(fresh) for _ in range(spare)]
        return Span(self.id, self.start, [token], blocks, tree, (self.choice,), follows=follows)


@dataclass
class Run:
    """A random run whose steps are laid out by `decoding`, and for comparison from scratch."""

    rng: random.Random
    decoding: Decoding = field(default_factory=lambda: Decoding(SIZE))
    lives: list[Life] = field(default_factory=list)
    last: list[Life] = field(default_factory=list)
    ids: count = field(default_factory=count)
    fresh: count = field(default_factory=lambda: count(1))
    followed: int = 0
    """Number of steps whose arrays are updated from the previous step's arrays."""

    def join(self) -> None:
        rng, id = self.rng, next(self.ids)
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7]), seed=rng.randrange(99), top_k=rng.randrange(3)
        )
        outputs = list(range(rng.randrange(4)))
        state = new_sequence(SequenceState(id, 0, params, [1, 2], outputs), None)
        start = rng.randrange(3 * SIZE)
        self.lives.append(
            Life(id, rng.randrange(3), state, start, [next(self.fresh) for _ in range(start // SIZE)])
        )

    def step(self) -> None:
        """Run a step in which each sequence of the last step continues by one token; or a random step."""
        rng = self.rng
        ahead = [life for life in self.last if life in self.lives and rng.random() < 0.9]
        if self.last and ahead and rng.random() < 0.8:
            self._check([life.span(rng, self.fresh, True) for life in ahead], ahead)
            return
        chosen = [life for life in self.lives if rng.random() < 0.8] or self.lives[:1]
        self._commit_last()
        draft = rng.choice([0, 0, 0, 2])
        self._check([life.span(rng, self.fresh, False, draft) for life in chosen], chosen)
        if draft:
            self.last = []

    def _check(self, spans: list[Span], lives: list[Life]) -> None:
        sources = {
            number: self.last.index(life)
            for number, (life, span) in enumerate(zip(lives, spans, strict=True))
            if span.follows
        }
        step, layout = self.decoding.follow(spans), lay_out(spans, SIZE)
        self.followed += step is not None
        states = {life.id: life.state for life in lives}
        step = step or self.decoding.begin(
            layout, states, {life.id: pack_params(life.state.params) for life in lives}, sources
        )
        if any(len(span.tree or ()) > 1 for span in spans):
            assert step is None
        else:
            assert step is not None
            _assert_same(step, layout, sources)
            outputs = [
                len(life.state.outputs) + span.follows for life, span in zip(lives, spans, strict=True)
            ]
            draws = [
                Draw(life.state.params, life.choice, output)
                for life, output in zip(lives, outputs, strict=True)
            ]
            assert np.array_equal(sample_arrays(step.nodes, step.nodes.shape)["draws"], pack_draws(draws))
        self._commit_last()
        for life in lives:
            life.start += 1
        self.last = lives

    def _commit_last(self) -> None:
        """Commit the last step's results: before the next launch, unless the next step follows from it."""
        for life in self.last:
            life.state.outputs.append(5)
        self.last = []


def _assert_same(step: DecodingStep, other: Layout, sources: dict[int, int]) -> None:
    """Assert that all arrays of a step's pass equal the arrays of a layout built from scratch."""
    passes = []
    for layout, origin in ((step.layout, step.sources), (other, sources)):
        plan = plan_attention(layout, SIZE, 2, 2, WINDOWS, 4, 64)
        passes.append({"tables": plan.tables, **forward_arrays(layout, plan, WINDOWS, origin)})
    assert passes[0].keys() == passes[1].keys()
    for name, array in passes[0].items():
        assert np.array_equal(array, passes[1][name]), name
    assert [part.span for part in step.layout.parts] == [part.span for part in other.parts]
    for part, same in zip(step.layout.parts, other.parts, strict=True):
        assert (part.offset, part.slots.tolist()) == (same.offset, same.slots.tolist())


@given(st.integers(0, 2**32))
def test_arrays_kept_from_step_to_step_are_those_made_from_the_spans(seed: int) -> None:
    run = Run(random.Random(seed))
    for _ in range(30):
        if not run.lives or run.rng.random() < 0.2:
            run.join()
        if len(run.lives) > 1 and run.rng.random() < 0.1:
            run.lives.pop(run.rng.randrange(len(run.lives)))
        run.step()
    assert run.followed > 0


@pytest.mark.parametrize(
    "wanted",
    [{"logprobs": 1}, {"min_tokens": 3}, {"presence_penalty": 0.5}],
)
def test_more_than_a_token_is_no_decoding_step(wanted: dict[str, Any]) -> None:
    params = replace(GREEDY, **wanted)
    state = new_sequence(SequenceState(0, 0, params, [1, 2], []), None)
    layout = lay_out([Span(0, 2, [7], [0], root(7), (0,))], SIZE)
    assert Decoding(SIZE).begin(layout, {0: state}, {0: pack_params(params)}, {}) is None


def test_numbers_that_are_not_finite_are_not_committed() -> None:
    states = [new_sequence(SequenceState(id, 0, GREEDY, [1, 2], []), None) for id in (0, 1)]
    layout = lay_out([Span(id, 2, [7], [id], root(7), (0,)) for id in (0, 1)], SIZE)
    packed = {id: pack_params(GREEDY) for id in (0, 1)}
    step = Decoding(SIZE).begin(layout, dict(enumerate(states)), packed, {})
    assert step is not None
    first, second = step.commit([3, NOT_FINITE])
    assert (first.outputs[0][0].token, first.not_finite, second.outputs, second.not_finite) == (
        3,
        False,
        [],
        True,
    )
    assert [state.outputs for state in states] == [[3], []]
