"""Each step has one round of speculation, which learns from drafted trees, verified or not."""

import pytest

from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.tree import TokenTree, root
from streamserve.speculation.controller import (
    CATCH_UP,
    FLAT,
    NO_CANDIDATES,
    MeasuredStep,
    Round,
    Speculation,
    SpeculationBatch,
)
from streamserve.speculation.level_acceptance import INITIAL_ACCEPTANCE
from streamserve.speculation.outlook import Candidate, Outlook
from streamserve.speculation.policies import GOODPUT, SpeculationPolicy
from streamserve.speculation.shapes import PLAIN, TreeShape
from streamserve.speculation.slo import NO_REQUIREMENT, LatencyRequirement

CHAIN = TokenTree((7, 3, 5), (-1, 0, 1), (1.0, 0.9, 0.9), (1.0, 0.9, 0.8))
BATCH = SpeculationBatch([Candidate(4, 16, id=1)], {1: NO_REQUIREMENT}, 1, 0, 16, 64)


def speculation() -> Speculation:
    return Speculation(parse_policy("fixed:4"), lambda query_tokens, kv_tokens: 1.0)


def draft(controller: Speculation, tree: TokenTree, requested: TreeShape) -> tuple[Round, TokenTree]:
    """Return a round in which the tree of one request arrives, and the nodes that are verified."""
    current = controller.begin(BATCH)
    return current, current.select({1: tree}, [requested], 0, 0.0)[1]


def verify(current: Round, tree: TokenTree, tokens: list[int]) -> None:
    current.learn(MeasuredStep(len(tree), 0, 1.0, len(tokens), [(1, tree, tokens)]))


def learn(tree: TokenTree, requested: TreeShape, tokens: list[int], times: int = 50) -> list[list[float]]:
    controller = speculation()
    for _ in range(times):
        verify(*draft(controller, tree, requested), tokens)
    return controller.level_acceptance.by_width()


def test_levels_are_learned_separately() -> None:
    level_acceptance = learn(CHAIN, TreeShape(2, 1), [3, 9])
    assert level_acceptance[0][0] > 0.9, "always accepted"
    assert level_acceptance[0][1] < 0.35, "always rejected"
    assert level_acceptance[0][2] == pytest.approx(level_acceptance[0][1]), (
        "a level without observations takes the rate of the level above"
    )


def test_requested_nodes_that_were_not_drafted_count_as_rejected() -> None:
    not_requested, requested = (
        learn(CHAIN, TreeShape(2, 1), [3, 5, 9]),
        learn(CHAIN, TreeShape(3, 1), [3, 5, 9]),
    )
    assert not_requested[0][2] > INITIAL_ACCEPTANCE[0]
    assert requested[0][2] < 0.35


def test_a_sibling_is_counted_separately() -> None:
    tree = TokenTree((7, 3, 5), (-1, 0, 0), (1.0, 0.9, 0.4), (1.0, 0.9, 0.4))
    level_acceptance = learn(tree, TreeShape(1, 2), [5])
    assert level_acceptance[0][0] < 0.35
    assert level_acceptance[1][0] - level_acceptance[0][0] > 0.6


def test_trees_that_were_not_verified_are_learned_from() -> None:
    controller = speculation()
    current, _ = draft(controller, CHAIN, TreeShape(2, 1))
    verify(current, root(7), [8])
    assert controller.level_acceptance.by_width()[0][0] < INITIAL_ACCEPTANCE[0]
    assert controller.counters.verified == 0


def test_a_round_knows_only_the_trees_of_its_own_step() -> None:
    controller = speculation()
    draft(controller, CHAIN, TreeShape(2, 1))
    later = controller.begin(BATCH)
    assert not later.drafted
    later.learn(MeasuredStep(1, 0, 1.0, 1))
    assert controller.level_acceptance.by_width()[0][0] == INITIAL_ACCEPTANCE[0]
    assert controller.counters.verified == 0


def test_a_round_without_candidates_only_times_its_step() -> None:
    controller = speculation()
    current = controller.begin(NO_CANDIDATES)
    assert current.shapes == []
    current.learn(MeasuredStep(1, 0, 1.0, 1))
    assert controller.step_cost.observed
    assert controller.throughput > 0.0


def test_a_round_that_is_not_executed_leaves_no_trace_of_its_drafting_time() -> None:
    controller = speculation()
    current, _ = draft(controller, CHAIN, TreeShape(2, 1))
    assert current.drafting_seconds == 0.0
    slow = controller.begin(BATCH)
    slow.select({1: CHAIN}, [TreeShape(2, 1)], 0, 9.0)
    assert slow.drafting_seconds == 9.0
    assert controller.begin(BATCH).drafting_seconds == 0.0


@pytest.mark.parametrize(("catch_up", "measured"), [(0, True), (CATCH_UP + 1, True), (CATCH_UP + 2, False)])
def test_drafting_that_first_read_many_tokens_is_no_measurement_of_its_cost(
    catch_up: int, measured: bool
) -> None:
    controller = speculation()
    controller.begin(BATCH).select({1: CHAIN}, [TreeShape(2, 1)], catch_up, 1.0)
    assert bool(controller.pass_cost.observed) == measured


def test_a_draft_model_reads_a_long_text_only_for_a_long_output() -> None:
    """A draft model reads a long text only for a long output: reading a token takes a tenth of a step, and
    two of three draft tokens are accepted."""
    controller = Speculation(
        GOODPUT, lambda query_tokens, kv_tokens: 1.0, lambda query_tokens: query_tokens / 10
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
    tokens: list[int], accepted: int, tested: int
) -> None:
    outlooks: list[Outlook] = []

    def shapes(seen: Outlook, state: None) -> tuple[list[TreeShape], None]:
        outlooks.append(seen)
        return [PLAIN] * len(seen.candidates), state

    controller = Speculation(SpeculationPolicy("recording", shapes), lambda query_tokens, kv_tokens: 1.0)
    current, _ = draft(controller, CHAIN, TreeShape(2, 1))
    verify(current, CHAIN, tokens)
    controller.begin(BATCH)
    assert (outlooks[-1].accepted, outlooks[-1].tested) == (accepted, tested)
    assert outlooks[-1].acceptance == accepted / 2


def test_a_policys_state_is_kept_from_step_to_step_and_not_shared() -> None:
    counting = SpeculationPolicy(
        "counting",
        lambda outlook, state: ([TreeShape(state, 1)] * len(outlook.candidates), state + 1),
        state=1,
    )
    one, other = (Speculation(counting, lambda query_tokens, kv_tokens: 1.0) for _ in range(2))
    assert [one.begin(BATCH).shapes[0].depth for _ in range(3)] == [1, 2, 3]
    assert other.begin(BATCH).shapes[0].depth == 1


@pytest.mark.parametrize(
    ("policy", "tpot", "slope", "whole"),
    [
        ("fixed:4", 0.01, 1.0, True),
        ("goodput", None, (FLAT - 1) / 5, True),
        ("goodput", None, FLAT - 1, False),
        ("goodput", 0.01, 0.0, False),
    ],
)
def test_trees_are_verified_unseen_where_none_of_their_nodes_would_be_left_out(
    policy: str, tpot: float | None, slope: float, whole: bool
) -> None:
    controller = Speculation(parse_policy(policy), lambda query_tokens, kv_tokens: 1 + slope * query_tokens)
    batch = BATCH._replace(requirements={1: LatencyRequirement(tpot)})
    assert controller.begin(batch).verifies_all([TreeShape(4, 1)]) == whole
