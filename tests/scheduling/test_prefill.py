"""A step computes the prompt tokens that are due, and further ones while they pay."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamserve.scheduling.ordering import MAX_WAIT
from streamserve.scheduling.prefill import MARGIN, DecodeBatch, chunks, due_tokens
from streamserve.scheduling.request import RequestView
from streamserve.speculation.slo import NO_REQUIREMENT, LatencyRequirement


def seconds(query_tokens: int) -> float:
    """Return the step costs of a machine that computes 16 query tokens in the time that reading the weights
    takes."""
    return 0.01 * max(1.0, query_tokens / 16)


def prompt(
    remaining: int, length: int, waited: float = 0.0, due_in: float | None = None, **fields: bool
) -> RequestView:
    """Return a prompt that was complete `waited` seconds ago, in a step that begins at 0."""
    return RequestView(-waited, remaining=remaining, length=length, deadline=due_in, **fields)


def decode_batch(
    *requirements: LatencyRequirement, budget: int = 512, max_chunk: int = 512, tokens_per_step: float = 1.0
) -> DecodeBatch:
    return DecodeBatch(requirements, seconds, budget, max_chunk, tokens_per_step=tokens_per_step)


prompts = st.lists(
    st.integers(1, 3000).flatmap(
        lambda remaining: st.builds(
            prompt, st.just(remaining), st.integers(remaining, 4000), st.floats(0, 60),
            st.none() | st.floats(-1, 20),
        )
    ),
    max_size=8,
)  # fmt: skip
requirements = st.lists(
    st.builds(LatencyRequirement, st.none() | st.floats(0.001, 1), st.floats(0, 10), st.integers(0, 500))
)


@given(
    prompts=prompts, requirements=requirements, budget=st.integers(1, 600), max_chunk=st.integers(1, 600),
    mean_output=st.floats(1, 1000), share=st.none() | st.floats(0, 1),
)  # fmt: skip
def test_chunks_fit_the_budget_include_what_is_due_and_make_progress(
    prompts, requirements, budget, max_chunk, mean_output, share
) -> None:
    batch = DecodeBatch(requirements, seconds, budget, max_chunk)
    result = chunks(prompts, batch, mean_output, share)
    assert sum(chunk.tokens for chunk in result) <= max(budget - len(requirements), 0)
    for request, chunk in zip(prompts, result, strict=True):
        assert 0 <= chunk.due <= chunk.tokens <= min(request.remaining, max_chunk)
    if prompts and budget > len(requirements):
        assert sum(chunk.tokens for chunk in result) > 0


def test_due_tokens_alone_meet_the_deadline() -> None:
    """Due tokens alone meet the deadline, step by step, even in more than the minimum number of steps."""
    remaining, time, steps = 400, 0.0, 0
    while remaining:
        (due,) = due_tokens([prompt(remaining, 400, time, 2.0 - time)], decode_batch(NO_REQUIREMENT))
        remaining -= due
        time += seconds(1 + due)
        steps += 1
    assert time <= 2.0 + 1e-9
    assert steps > 50


def test_an_earlier_deadline_gets_more_tokens() -> None:
    due = [due_tokens([prompt(200, 200, 0, due_in)], decode_batch())[0] for due_in in (0.3, 1.0, 4.0)]
    assert due == sorted(due, reverse=True)
    assert due[0] > due[2] > 0


def test_infeasible_deadlines_are_not_pursued() -> None:
    """Infeasible deadlines are not pursued: 2000 tokens take 1.25 s at least; 100 tokens in 0.08 s are eight
    steps of 13, after the margin."""
    infeasible, urgent = prompt(2000, 2000, 0.0, 0.5), prompt(100, 100, 0.0, 0.08 + MARGIN * 0.01)
    due = due_tokens([infeasible, urgent], decode_batch())
    assert due[1] == 13
    assert due[0] == due_tokens([prompt(2000, 2000), urgent], decode_batch())[0] < 20


def test_a_prompt_that_waited_long_without_a_target_is_computed_faster() -> None:
    fresh, old = (
        due_tokens([prompt(1000, 1000, waited)], decode_batch())[0] for waited in (0.0, 2 * MAX_WAIT)
    )
    assert 0 < fresh < old


def test_prompts_wait_for_a_target_they_would_break_and_use_slack() -> None:
    tight, ahead = LatencyRequirement(0.02, 1.0, 50), LatencyRequirement(0.02, 1.0, 60)
    request = prompt(1000, 1000)
    tokens = [
        chunks([request], decode_batch(requirement), 10_000.0)[0].tokens
        for requirement in (tight, ahead, NO_REQUIREMENT)
    ]
    assert seconds(1 + tokens[0]) <= 0.02
    assert 0.02 < seconds(1 + tokens[1]) <= ahead.slack(1.0)
    assert tokens[2] == 511


def test_a_target_that_is_missed_anyway_delays_no_prompt() -> None:
    assert (
        chunks([prompt(1000, 1000)], decode_batch(LatencyRequirement(0.005, 1.0, 0)), 10_000.0)[0].tokens
        == 511
    )


def test_accepted_draft_tokens_leave_more_time() -> None:
    requirement, request = LatencyRequirement(0.02, 1.0, 50), prompt(1000, 1000)
    slow, fast = (
        chunks([request], decode_batch(requirement, tokens_per_step=tokens_per_step), 1e4)[0].tokens
        for tokens_per_step in (1.0, 3.0)
    )
    assert slow < fast


def test_short_prompts_are_worth_more_than_what_decodes_and_long_ones_less() -> None:
    decoding = [NO_REQUIREMENT] * 16
    short, long = prompt(16, 16), prompt(500, 500)
    result = chunks([long, short], decode_batch(*decoding), 64.0)
    assert result[1].tokens == 16
    assert result[0].tokens == result[0].due
    assert chunks([long], decode_batch(), 64.0)[0].tokens == 500


def test_a_fixed_share_is_taken_in_order_whatever_it_is_worth() -> None:
    result = chunks([prompt(500, 500), prompt(16, 16)], decode_batch(*[NO_REQUIREMENT] * 16), 1.0, share=0.5)
    assert [chunk.tokens for chunk in result] == [256, 0]


def test_with_a_streamed_prompt_all_are_computed_in_order_as_fast_as_targets_allow() -> None:
    """With a streamed prompt, all prompts are computed in order as fast as targets allow. Without one, with
    eight decoding sequences, a long prompt would be delayed and overtaken by a short one."""
    long, short = prompt(900, 900, running=True), prompt(100, 100, running=True)
    decoding = decode_batch(*[NO_REQUIREMENT] * 8, budget=256)
    untargeted = chunks([long, short], decoding, 16.0)
    assert untargeted[0].tokens < untargeted[1].tokens
    stream = prompt(900, 900, running=True, streamed=True)
    streamed = chunks([stream, short], decoding, 16.0)
    assert streamed[0].tokens + streamed[1].tokens == 248
    assert streamed[0].tokens > streamed[1].tokens
    strict = decode_batch(*[LatencyRequirement(0.02, 1.0, 50)] * 8, budget=256)
    given = chunks([stream], strict, 16.0)
    assert seconds(8 + given[0].tokens) <= 0.02


def test_a_prompt_is_computed_where_a_step_without_query_tokens_takes_no_time() -> None:
    """A prompt is computed even if a step without query tokens takes no time: measured curves have cost 0
    without tokens. A share of 0 does not delay the first prompt either."""
    batch = DecodeBatch((), lambda query_tokens: 0.01 if query_tokens else 0.0, 512, 512)
    (only,) = chunks([prompt(100, 100, 0.0, None)], batch, 64.0, share=0.0)
    assert only.tokens > 0


def test_a_cached_prefix_only_counts_as_computed_once_the_prompt_holds_its_blocks() -> None:
    waiting, running = (
        RequestView(0.0, remaining=500, length=500, cached=480, running=running) for running in (False, True)
    )
    assert [chunks([view], decode_batch(), 64.0)[0].tokens for view in (waiting, running)] == [20, 500]


@given(
    prompts=prompts, requirements=requirements, budget=st.integers(1, 600), max_chunk=st.integers(1, 600),
    mean_output=st.floats(1, 1000), share=st.none() | st.floats(0, 1), data=st.data(),
)  # fmt: skip
def test_no_prompt_gets_more_than_its_due_before_more_urgent_ones_have_all_they_can_use(
    prompts, requirements, budget, max_chunk, mean_output, share, data
) -> None:
    urgency = st.sampled_from((-5, 0, 5))
    ranked = sorted((replace(prompt, priority=data.draw(urgency)) for prompt in prompts), key=_priority)
    priorities = [data.draw(urgency) for _ in requirements]
    batch = DecodeBatch(requirements, seconds, budget, max_chunk, priorities=priorities)
    result = chunks(ranked, batch, mean_output, share)
    assert sum(chunk.tokens for chunk in result) <= max(budget - len(requirements), 0)
    satisfied = True
    for priority in sorted(set(map(_priority, ranked))):
        level = [(p, chunk) for p, chunk in zip(ranked, result, strict=True) if p.priority == priority]
        assert satisfied or all(chunk.tokens == chunk.due for _, chunk in level)
        satisfied = satisfied and all(chunk.tokens == min(p.remaining, max_chunk) for p, chunk in level)


def _priority(view: RequestView) -> int:
    return view.priority


def test_a_prompt_that_outranks_all_that_decodes_gets_all_that_targets_allow() -> None:
    """A prompt that outranks all decoding sequences gets as many tokens as their targets allow. By value
    alone it would get none: its output is short, and many sequences decode."""
    outranking = replace(prompt(1500, 1500, running=True), priority=-1)
    free = [NO_REQUIREMENT] * 16
    assert chunks([outranking], DecodeBatch(free, seconds, 512, 512), 1.0)[0].tokens < 10
    (chunk,) = chunks([outranking], DecodeBatch(free, seconds, 512, 512, priorities=[0] * 16), 1.0)
    assert chunk.tokens == 512 - 16
    strict = [LatencyRequirement(seconds(64), 0.0, 0)] * 16
    (chunk,) = chunks([outranking], DecodeBatch(strict, seconds, 512, 512, priorities=[0] * 16), 1.0)
    assert 32 < chunk.tokens <= 64 - 16, "no step is longer than their target"
