"""The statistics of drafted trees, verified or not."""

import pytest

from streamserve.speculation import policies
from streamserve.speculation.controller import INITIAL_ACCEPTANCE, Speculation
from streamserve.speculation.outlook import Candidate, Outlook
from streamserve.speculation.policies import parse_policy
from streamserve.speculation.shapes import PLAIN, Shape
from streamserve.speculation.slo import NO_REQUIREMENT
from streamserve.speculation.tree import TokenTree, root

CHAIN = TokenTree((7, 3, 5), (-1, 0, 1), (1.0, 0.9, 0.9), (1.0, 0.9, 0.8))


def speculation() -> Speculation:
    return Speculation(parse_policy("fixed:4"), lambda query_tokens, kv_tokens: 1.0)


def draft(controller: Speculation, tree: TokenTree, requested: Shape) -> TokenTree:
    return controller.choose({1: tree}, {1: False}, 1, {1: NO_REQUIREMENT}, 0, 0.0, 64, {1: requested})[1]


def learn(tree: TokenTree, requested: Shape, tokens: list[int], times: int = 50) -> list[list[float]]:
    controller = speculation()
    for _ in range(times):
        controller.record_verification(1, draft(controller, tree, requested), tokens, sampled=False)
    return controller._level_acceptance()


def test_levels_are_learned_separately() -> None:
    level_acceptance = learn(CHAIN, Shape(2, 1), [3, 9])
    assert level_acceptance[0][0] > 0.9, "always accepted"
    assert level_acceptance[0][1] < 0.35, "always rejected"
    assert level_acceptance[0][2] == pytest.approx(level_acceptance[0][1]), (
        "without observations it takes the level above"
    )


def test_requested_nodes_that_were_not_drafted_count_as_rejected() -> None:
    not_requested, requested = learn(CHAIN, Shape(2, 1), [3, 5, 9]), learn(CHAIN, Shape(3, 1), [3, 5, 9])
    assert not_requested[0][2] > INITIAL_ACCEPTANCE[0]
    assert requested[0][2] < 0.35


def test_a_sibling_is_counted_separately() -> None:
    tree = TokenTree((7, 3, 5), (-1, 0, 0), (1.0, 0.9, 0.4), (1.0, 0.9, 0.4))
    level_acceptance = learn(tree, Shape(1, 2), [5])
    assert level_acceptance[0][0] < 0.35
    assert level_acceptance[1][0] - level_acceptance[0][0] > 0.6


def test_trees_that_were_not_verified_are_learned_from() -> None:
    controller = speculation()
    draft(controller, CHAIN, Shape(2, 1))
    controller.record_verification(1, root(7), [8], sampled=False)
    assert controller._level_acceptance()[0][0] < INITIAL_ACCEPTANCE[0]
    assert controller.counters.verified == 0


def test_trees_of_an_earlier_step_are_not_learned_from() -> None:
    controller = speculation()
    draft(controller, CHAIN, Shape(2, 1))
    controller.shapes([], 1, 0, 16)
    controller.record_verification(1, root(7), [8], sampled=False)
    assert controller._level_acceptance()[0][0] == INITIAL_ACCEPTANCE[0]


def test_a_draft_model_reads_a_long_text_only_for_a_long_output() -> None:
    """A token takes a tenth of a step to read, and two of three draft tokens are accepted."""
    controller = Speculation(
        parse_policy("goodput"), lambda query_tokens, kv_tokens: 1.0, lambda query_tokens: query_tokens / 10
    )
    assert controller.worth_catching_up(1, 0)(20, 0), (
        "unread tokens of one step are read in the first draft pass"
    )
    assert controller.worth_catching_up(1, 0)(100, 64)
    assert not controller.worth_catching_up(1, 0)(100, 4)
    assert not controller.worth_catching_up(1, 0)(1000, 64)
    assert not controller.worth_catching_up(8, 0)(100, 64), (
        "with eight sequences, each saves an eighth of a step"
    )
    fixed = Speculation(
        parse_policy("fixed:4"), lambda query_tokens, kv_tokens: 1.0, lambda query_tokens: query_tokens / 10
    )
    assert fixed.worth_catching_up(1, 0)(1000, 4), "a fixed shape is always drafted"


@pytest.mark.parametrize(("tokens", "accepted", "tested"), [([8], 0, 1), ([3, 9], 1, 2), ([3, 5, 9], 2, 2)])
def test_draft_tokens_after_a_rejected_one_were_not_tested(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], accepted: int, tested: int
) -> None:
    outlooks: list[Outlook] = []
    controller = speculation()
    monkeypatch.setattr(
        policies, "shapes", lambda policy, outlook, flow: (outlooks.append(outlook) or [PLAIN], flow)
    )
    controller.record_verification(1, draft(controller, CHAIN, Shape(2, 1)), tokens, sampled=False)
    controller.shapes([Candidate(2, 2)], 1, 0, 16)
    assert (outlooks[0].accepted, outlooks[0].tested) == (accepted, tested)
    assert outlooks[0].acceptance == accepted / 2
