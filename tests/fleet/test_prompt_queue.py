"""The sums over a worker's prompts, which are updated with each change, equal the sums computed from all
prompts."""

from hypothesis import given
from hypothesis import strategies as st

from streamserve.fleet.prompt_queue import PromptQueue, Queued
from streamserve.scheduling.routing import STEP_TOKENS

sizes = st.integers(1, 100) | st.integers(STEP_TOKENS - 2, 2 * STEP_TOKENS)
complete = st.builds(Queued, sizes, st.none() | st.integers(0, 9).map(float))
changes = st.tuples(st.sampled_from("abcde"), st.none() | st.just(0) | sizes | complete)


@given(st.lists(changes, max_size=40), st.integers(0, 9).map(float))
def test_sums_are_kept_through_changes(changes: list[tuple[str, int | Queued | None]], now: float) -> None:
    queue, prompts = PromptQueue(), dict[str, int | Queued]()
    for request, prompt in changes:
        if prompt is None:
            assert queue.remove(request) == isinstance(prompts.pop(request, None), Queued)
        elif isinstance(prompt, Queued):
            queue.put(request, prompt)
            prompts[request] = prompt
        else:
            queue.arrives(request, prompt)
            prompts.pop(request, None)
            if prompt:
                prompts[request] = prompt
    finished = [prompt for prompt in prompts.values() if isinstance(prompt, Queued)]
    tokens = [prompt.tokens if isinstance(prompt, Queued) else prompt for prompt in prompts.values()]
    assert (len(queue), queue.tokens) == (len(prompts), sum(tokens))
    assert sorted(queue.long_prompts) == sorted(count for count in tokens if count > STEP_TOKENS)
    assert queue.computing == bool(finished)
    deadlines = {prompt: float("inf") if prompt.deadline is None else prompt.deadline for prompt in finished}
    in_time = [prompt for prompt in finished if deadlines[prompt] >= now]
    until = max((deadlines[prompt] for prompt in in_time), default=now)
    assert queue.timely(now) == (sum(prompt.tokens for prompt in in_time), until)
