"""Prompt chunks of a step: what is due, and what pays beyond it."""

from hypothesis import given
from hypothesis import strategies as st

from streamserve.scheduling.ordering import PATIENCE
from streamserve.scheduling.prefill import MARGIN, Company, Prompt, chunks, due_tokens
from streamserve.speculation.slo import NO_NEED, Need


def seconds(rows: int) -> float:
    """A machine that computes 16 rows in the time it takes to read the weights."""
    return 0.01 * max(1.0, rows / 16)


def company(*needs: Need, budget: int = 512, most: int = 512, pace: float = 1.0) -> Company:
    return Company(needs, seconds, budget, most, pace)


prompts = st.lists(
    st.integers(1, 3000).flatmap(
        lambda remaining: st.builds(
            Prompt, st.just(remaining), st.integers(remaining, 4000), st.floats(0, 60),
            st.none() | st.floats(-1, 20),
        )
    ),
    max_size=8,
)  # fmt: skip
needs = st.lists(st.builds(Need, st.none() | st.floats(0.001, 1), st.floats(0, 10), st.integers(0, 500)))


@given(
    prompts=prompts, needs=needs, budget=st.integers(1, 600), most=st.integers(1, 600),
    mean_output=st.floats(1, 1000), share=st.none() | st.floats(0, 1),
)  # fmt: skip
def test_chunks_fit_the_budget_hold_what_is_due_and_let_somebody_move(
    prompts, needs, budget, most, mean_output, share
) -> None:
    there = Company(needs, seconds, budget, most)
    found = chunks(prompts, there, mean_output, share)
    assert sum(chunk.tokens for chunk in found) <= max(budget - len(needs), 0)
    for prompt, chunk in zip(prompts, found, strict=True):
        assert 0 <= chunk.due <= chunk.tokens <= min(prompt.remaining, most)
    if prompts and budget > len(needs):
        assert sum(chunk.tokens for chunk in found) > 0


def test_a_prompt_is_in_time_by_what_is_due_alone() -> None:
    """Step by step, with nothing but the due tokens, and without hurry."""
    remaining, time, steps = 400, 0.0, 0
    while remaining:
        (due,) = due_tokens([Prompt(remaining, 400, time, 2.0 - time)], company(NO_NEED))
        remaining -= due
        time += seconds(1 + due)
        steps += 1
    assert time <= 2.0 + 1e-9
    assert steps > 50


def test_a_sooner_deadline_takes_more() -> None:
    taken = [due_tokens([Prompt(200, 200, 0, due_in)], company())[0] for due_in in (0.3, 1.0, 4.0)]
    assert taken == sorted(taken, reverse=True)
    assert taken[0] > taken[2] > 0


def test_what_cannot_be_in_time_is_not_chased() -> None:
    """2000 tokens take 1.25 s at least; 100 tokens in 0.08 s are eight steps of 13, behind those to spare."""
    infeasible, urgent = Prompt(2000, 2000, 0.0, 0.5), Prompt(100, 100, 0.0, 0.08 + MARGIN * 0.01)
    due = due_tokens([infeasible, urgent], company())
    assert due[1] == 13
    assert due[0] == due_tokens([Prompt(2000, 2000), urgent], company())[0] < 20


def test_who_waited_long_without_a_target_moves_faster() -> None:
    fresh, old = (due_tokens([Prompt(1000, 1000, waited)], company())[0] for waited in (0.0, 2 * PATIENCE))
    assert 0 < fresh < old


def test_prompts_wait_for_a_target_that_they_would_break_and_use_the_slack_of_one_ahead() -> None:
    tight, ahead = Need(0.02, 1.0, 50), Need(0.02, 1.0, 60)
    prompt = Prompt(1000, 1000, due_in=None)
    beside = [chunks([prompt], company(need), 10_000.0)[0].tokens for need in (tight, ahead, NO_NEED)]
    assert seconds(1 + beside[0]) <= 0.02
    assert 0.02 < seconds(1 + beside[1]) <= ahead.slack(1.0)
    assert beside[2] == 511


def test_a_target_that_is_missed_anyway_holds_nobody_up() -> None:
    assert chunks([Prompt(1000, 1000)], company(Need(0.005, 1.0, 0)), 10_000.0)[0].tokens == 511


def test_guesses_that_are_right_leave_more_time() -> None:
    need, prompt = Need(0.02, 1.0, 50), Prompt(1000, 1000)
    slow, fast = (chunks([prompt], company(need, pace=pace), 1e4)[0].tokens for pace in (1.0, 3.0))
    assert slow < fast


def test_short_prompts_are_worth_more_than_what_decodes_and_long_ones_less() -> None:
    decoding = [NO_NEED] * 16
    short, long = Prompt(16, 16), Prompt(500, 500)
    found = chunks([long, short], company(*decoding), 64.0)
    assert found[1].tokens == 16
    assert found[0].tokens == found[0].due
    assert chunks([long], company(), 64.0)[0].tokens == 500


def test_a_fixed_share_is_taken_in_order_whatever_it_is_worth() -> None:
    found = chunks([Prompt(500, 500), Prompt(16, 16)], company(*[NO_NEED] * 16), 1.0, share=0.5)
    assert [chunk.tokens for chunk in found] == [256, 0]


def test_with_one_that_was_streamed_prompts_come_in_turn_as_fast_as_targets_allow() -> None:
    """Beside eight that decode, a long prompt alone would be held back, and a short one overtake it."""
    long, short = Prompt(900, 900, running=True), Prompt(100, 100, running=True)
    decoding = company(*[NO_NEED] * 8, budget=256)
    held = chunks([long, short], decoding, 16.0)
    assert held[0].tokens < held[1].tokens
    streamed = chunks([long._replace(streamed=True), short], decoding, 16.0)
    assert streamed[0].tokens + streamed[1].tokens == 248
    assert streamed[0].tokens > streamed[1].tokens
    strict = company(*[Need(0.02, 1.0, 50)] * 8, budget=256)
    given = chunks([long._replace(streamed=True)], strict, 16.0)
    assert seconds(8 + given[0].tokens) <= 0.02


def test_a_prompt_moves_where_a_step_without_query_tokens_takes_no_time() -> None:
    """As measured curves say: nothing costs nothing. Nor does a share of 0 keep the first prompt waiting."""
    there = Company((), lambda rows: 0.01 if rows else 0.0, 512, 512)
    (only,) = chunks([Prompt(100, 100, 0.0, None)], there, 64.0, share=0.0)
    assert only.tokens > 0
