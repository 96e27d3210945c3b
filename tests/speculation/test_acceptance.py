"""Calibrated acceptance follows measured frequencies, is monotone, and never exceeds the parent's."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.tree import TokenTree
from streamserve.speculation.acceptance import Acceptance, first_children, isotonic


def tree(parents: list[int], scores: list[float]) -> TokenTree:
    size = len(parents)
    return TokenTree(tuple(range(size)), tuple(parents), tuple(scores), (1.0,) * size)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 10)), min_size=1, max_size=20))
def test_isotonic_regression_is_monotone_and_keeps_the_weighted_mean(pairs):
    values, weights = np.array(pairs).T
    fitted = isotonic(values, weights)
    assert (np.diff(fitted) >= 0).all()
    assert np.isclose((fitted * weights).sum(), (values * weights).sum())


def test_isotonic_regression_leaves_what_is_monotone_alone():
    values = np.array([0.1, 0.1, 0.5, 0.9])
    assert (isotonic(values, np.ones(4)) == values).all()


def test_frequencies_are_learned_whatever_the_drafters_scores():
    """Frequencies are learned whatever scores the drafter gives: its score is 0.9, and every third draft
    token is accepted."""
    acceptance, rng = Acceptance(), random.Random(1)
    draft = tree([-1, 0], [1.0, 0.9])
    for _ in range(3000):
        acceptance.learn(draft, [1 if rng.random() < 1 / 3 else 9], sampled=False)
    assert abs(acceptance.calibrate(draft, False).accept[1] - 1 / 3) < 0.05
    assert acceptance.calibrate(draft, True).accept[1] > 0.8, "sampled requests are a separate class"


def test_nodes_with_a_rejected_parent_are_not_learned_from():
    acceptance = Acceptance()
    before = np.sum(acceptance.tested)
    acceptance.learn(tree([-1, 0, 1, 2], [1.0, 0.5, 0.5, 0.5]), [9], sampled=False)
    assert np.sum(acceptance.tested) == before + 1


def test_nodes_after_the_last_token_are_not_learned_from():
    """Nodes after the last token are not learned from. The target chose one token, the first draft token, so
    whether the second would be accepted is unknown."""
    acceptance = Acceptance()
    before = np.sum(acceptance.tested)
    acceptance.learn(tree([-1, 0, 1], [1.0, 0.5, 0.5]), [1], sampled=False)
    assert np.sum(acceptance.tested) == before + 1


def test_the_first_child_is_the_best_draft_token():
    assert first_children(tree([-1, 0, 0, 1, 1, 2], [1.0] * 6)) == [True, True, False, True, False, True]


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_a_path_is_never_likelier_than_its_beginning(scores, rng):
    parents = [-1] + [rng.randrange(node) for node in range(1, len(scores) + 1)]
    calibrated = Acceptance().calibrate(tree(parents, [1.0, *scores]), rng.random() < 0.5)
    assert all(calibrated.accept[n] <= calibrated.accept[p] for n, p in enumerate(parents) if n)
