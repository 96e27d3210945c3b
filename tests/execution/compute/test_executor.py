"""A step gives the same tokens as plain decoding, for any chunks, batch, draft tokens and preemptions."""

import msgspec
import numpy as np
import pytest
import torch

from streamserve.contracts.plan import Executor, Span, StepPlan
from streamserve.contracts.tree import TokenTree, chain
from streamserve.execution.backends.native.library import kernels
from streamserve.protocol.sampling import SamplingParams
from tests.checkpoints import reference_model
from tests.execution.drive import BLOCK_SIZE, Driver, Task, run_alone
from tests.execution.executing import (
    GREEDY,
    KINDS,
    PENALIZED,
    SAMPLED,
    VOCAB,
    executor_of,
    loaded_from,
    prompt_of,
    random_trees,
)


@pytest.fixture(
    scope="module", params=["native", "reference", "device"] if kernels() else ["reference", "device"]
)
def backend(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def executor(shared_checkpoint, backend) -> Executor:
    return executor_of(shared_checkpoint(), backend)


@pytest.fixture(scope="module")
def windowed(shared_checkpoint, backend) -> Executor:
    return executor_of(shared_checkpoint("mistral", sliding_window=6), backend)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 6}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    ],
    ids=str,
)
def test_greedy_text_is_that_of_transformers(shared_checkpoint, architecture, overrides):
    folder = shared_checkpoint(architecture, **overrides)
    prompt = prompt_of(21)
    expected = reference_model(folder).generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 21:]
    assert run_alone(executor_of(folder), Task(prompt, GREEDY, chunk=8), 30) == expected.tolist()


@pytest.mark.each_pair
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_text_does_not_depend_on_chunks(executor, kind, chunk):
    prompt, params = prompt_of(23), KINDS[kind]
    plain = run_alone(executor, Task(prompt, params), 20)
    assert run_alone(executor, Task(prompt, params, chunk=chunk), 20) == plain


@pytest.mark.each_pair
@pytest.mark.parametrize("model", ["executor", "windowed"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_does_not_depend_on_draft_tokens(request, backend, model, kind, scale):
    executor, params = request.getfixturevalue(model), KINDS[kind]
    in_trees, in_chains, seeds = 0, 0, scale.pick(2, 4)
    for seed in range(seeds):
        prompt = prompt_of(17, seed)
        plain = run_alone(executor, Task(prompt, params), 40)
        task = Task(prompt, params, draft=random_trees(plain, seed))
        assert run_alone(executor, task, 40) == plain
        in_trees += task.accepted
        chained = Task(
            prompt, params, draft=lambda token, done, plain=plain: chain([token, *plain[done : done + 4], 5])
        )
        assert run_alone(executor, chained, 40) == plain
        in_chains += chained.accepted
    assert in_trees > 10 * seeds
    assert in_chains > 25 * seeds


def test_each_tree_branch_is_what_its_chain_is(executor):
    """Each branch of a tree equals its chain: the tokens after every node, if accepted, are the tokens after
    the same sequence without a tree."""
    prompt, params = prompt_of(11), SamplingParams(temperature=0.0, logprobs=5)
    expected_text = run_alone(executor, Task(prompt, params), 6)
    wrong = (expected_text[1] + 1) % VOCAB
    tree = TokenTree(
        (
            expected_text[0],
            expected_text[1],
            wrong,
            expected_text[1],
            expected_text[2],
            expected_text[3],
            9,
            expected_text[4],
        ),
        (-1, 0, 0, 2, 1, 4, 4, 5),
        (0.0,) * 8,
        (1.0,) * 8,
    )
    task = Task([*prompt, expected_text[0]], params, draft=lambda token, done: tree)
    run_alone(executor, task, 5)
    assert [sampled.token for sampled in task.sampled] == expected_text[1:]
    assert task.accepted == 4  # nodes 1, 4, 5, 7: moved together from scattered slots
    for count, sampled in enumerate(task.sampled):
        replay = Task([*prompt, *expected_text[: count + 1]], params)
        run_alone(executor, replay, 1)
        assert replay.sampled[0].token == sampled.token
        assert replay.sampled[0].logprob == pytest.approx(sampled.logprob, abs=1e-4)
        assert [top.token for top in replay.sampled[0].top] == [top.token for top in sampled.top]


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(8))
def test_text_does_not_depend_on_co_batched_requests(executor, seed):
    """Text does not depend on co-batched requests: requests of all kinds are split into chunks, drafted for,
    preempted, resumed and released."""
    rng = np.random.default_rng(seed)
    driver, tasks, expected = Driver(executor, seed), [], []
    for number, params in enumerate([GREEDY, SAMPLED, PENALIZED, SAMPLED, GREEDY]):
        prompt = prompt_of(int(rng.integers(1, 30)), seed + number)
        choice = int(rng.integers(3))
        expected.append(run_alone(executor, Task(prompt, params, choice), 15))
        draft = random_trees(expected[-1], seed) if number % 2 else None
        tasks.append(Task(prompt, params, choice, chunk=int(rng.integers(1, 12)), draft=draft))
    names = {driver.add(task): task for task in tasks}
    preempted = 0
    while names:
        driver.step()
        for name, task in list(names.items()):
            if len(task.outputs) >= 15 or rng.random() < 0.08:
                del names[name]
                left = driver.remove(name)
                if len(left.outputs) < 15:
                    preempted += 1
                    task.blocks, task.computed = [], 0
                    names[driver.add(task)] = task
    assert [task.outputs[:15] for task in tasks] == expected
    assert preempted > 0
    assert sum(task.accepted for task in tasks) > 0
    assert max(driver.rows) > len(tasks)


@pytest.mark.parametrize("params", [SAMPLED, PENALIZED], ids=["sampled", "penalized"])
def test_choices_fork_from_one_root_and_continue_separately(executor, params):
    prompt = prompt_of(14)
    expected = [run_alone(executor, Task(prompt, params, choice), 12) for choice in range(3)]
    assert len({tuple(text) for text in expected}) == 3
    driver = Driver(executor)
    first = Task(prompt, params, choices=(0, 1, 2), chunk=6)
    driver.add(first)
    while not first.outputs:
        driver.step()
    assert [fork[0].token for fork in first.forks] == [expected[1][0], expected[2][0]]
    for choice, fork in enumerate(first.forks, start=1):
        blocks = [driver.free.pop() for _ in first.blocks]
        driver.copies += list(zip(first.blocks, blocks, strict=True))
        tokens = [*prompt, fork[0].token]
        driver.add(Task(prompt, params, choice, tokens=tokens, computed=len(prompt), blocks=blocks))
    while min(len(task.outputs) for task in driver.tasks.values()) < 12:
        driver.step()
    assert [task.outputs[:12] for task in driver.tasks.values()] == expected


def test_a_sequence_goes_on_as_the_first_choice_of_its_root(executor):
    """A sequence continues as the first remaining choice: the choice that it was admitted for may have been
    cancelled while its prompt was computed."""
    prompt = prompt_of(9)
    expected = run_alone(executor, Task(prompt, SAMPLED, 2), 8)
    assert run_alone(executor, Task(prompt, SAMPLED, 0, choices=(2, 3)), 1) == expected[:1]
    task = Task(prompt, SAMPLED, 0, choices=(2, 3))
    assert run_alone(executor, task, 8) == expected


def test_blocks_are_copied_before_anything_is_computed(executor):
    """Blocks are copied before anything is computed: a shared, partly filled block is copied, and both owners
    write on."""
    prompt = prompt_of(4 * BLOCK_SIZE + 2)
    expected = [run_alone(executor, Task([*prompt, last], GREEDY), 6) for last in (50, 60)]
    driver = Driver(executor)
    original = Task(prompt, GREEDY)
    driver.add(original)
    driver.step()
    copied = driver.free.pop()
    shared = original.blocks[:-1]
    driver.copies = [(original.blocks[-1], copied)]
    driver.remove(1)
    driver.free = [block for block in driver.free if block not in original.blocks]
    tasks = [
        Task([*prompt, 50], GREEDY, computed=len(prompt), blocks=list(original.blocks)),
        Task([*prompt, 60], GREEDY, computed=len(prompt), blocks=[*shared, copied]),
    ]
    for task in tasks:
        driver.add(task)
    for _ in range(6):
        driver.step()
    assert [task.outputs for task in tasks] == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_prompt_logprobs_are_those_of_the_whole_prompt(shared_checkpoint, executor, chunk):
    prompt = prompt_of(45)
    task = Task(prompt, msgspec.structs.replace(GREEDY, prompt_logprobs=3), chunk=chunk)
    run_alone(executor, task, 3)
    with torch.inference_mode():
        table = reference_model(shared_checkpoint())(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert [entry.token for entry in task.prompt_logprobs] == prompt[1:]
    for position, entry in enumerate(task.prompt_logprobs):
        order = table[position].argsort(descending=True).tolist()
        assert entry.logprob == pytest.approx(float(table[position, entry.token]), abs=1e-4)
        assert entry.rank == order.index(entry.token) + 1
        assert [sampled.token for sampled in entry.top] == order[:3]


def test_logprobs_are_of_the_unprocessed_distribution(shared_checkpoint, executor):
    prompt = prompt_of(20)
    params = msgspec.structs.replace(PENALIZED, logprobs=2, temperature=2.0)
    task = Task(prompt, params)
    outputs = run_alone(executor, task, 10)
    with torch.inference_mode():
        logits = reference_model(shared_checkpoint())(torch.tensor([prompt + outputs])).logits[0]
    table = logits[19:-1].log_softmax(-1)
    unlikely = 0
    for row, sampled in enumerate(task.sampled):
        assert sampled.logprob == pytest.approx(float(table[row, sampled.token]), abs=1e-4)
        assert [top.token for top in sampled.top] == table[row].topk(2).indices.tolist()
        unlikely += sampled.token != sampled.top[0].token
    assert unlikely > 0
    plain = Task(prompt, GREEDY)
    run_alone(executor, plain, 2)
    assert plain.sampled[0].logprob is None
    assert plain.sampled[0].top is None


def test_min_tokens_holds_inside_a_tree(executor):
    """min_tokens is respected inside a tree: a text that would end continues until the minimum, and ends
    right after it."""
    prompt = prompt_of(12)
    text = run_alone(executor, Task(prompt, GREEDY), 10)
    end = text[2]
    params = SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=(end,))
    plain = run_alone(executor, Task(prompt, params), 10)
    assert text[:2] == plain[:2]
    assert end not in plain[:6]
    drafted = Task(prompt, params, draft=lambda token, done: chain([token, *plain[done : done + 8]]))
    assert run_alone(executor, drafted, 10) == plain
    assert drafted.accepted > 5


def test_penalties_count_the_drafted_path(executor):
    """Penalties count drafted tokens: a text that repeats itself stops doing so under a penalty, with and
    without draft tokens."""
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)
    prompt = prompt_of(5, 1)
    plain = run_alone(executor, Task(prompt, params), 30)
    assert plain != run_alone(executor, Task(prompt, GREEDY), 30)
    drafted = Task(prompt, params, draft=lambda token, done: chain([token, *plain[done : done + 6]]))
    assert run_alone(executor, drafted, 30) == plain
    assert drafted.accepted > 20


def test_a_wide_tree_may_be_deeper_than_a_block(windowed):
    prompt = prompt_of(3)
    plain = run_alone(windowed, Task(prompt, GREEDY), 40)
    task = Task(prompt, GREEDY, draft=random_trees(plain, 5, size=25))
    assert run_alone(windowed, task, 40) == plain
    assert task.accepted > 3 * BLOCK_SIZE


def test_an_empty_step_forgets_and_copies_only(executor):
    assert executor.run(StepPlan(0, [], [12345], [(0, 1)], [])).spans == []


def test_a_draft_group_is_refused(executor):
    driver = Driver(executor)
    driver.add(Task([1, 2, 3], GREEDY))
    span = Span(1, 0, [1, 2, 3], [0], group=1)
    with pytest.raises(ValueError, match="group"):
        executor.run(StepPlan(0, driver.admitted, [], [], [span]))


def test_a_span_over_too_few_blocks_is_refused_before_anything_is_written(shared_checkpoint, backend):
    loaded = loaded_from(shared_checkpoint(), backend)
    executor, content = loaded.executor, loaded.cache.data.view(torch.uint8)
    before = content.clone()
    with pytest.raises(ValueError, match="blocks"):
        executor.run(StepPlan(0, [], [], [], [Span(1, 0, [1] * 9, [0, 1])]))
    assert torch.equal(content, before)


def test_a_closed_executor_holds_no_tensors(shared_checkpoint, backend):
    import gc
    import weakref

    loaded = loaded_from(shared_checkpoint(), backend)
    closed, references = loaded.executor, [weakref.ref(loaded.cache), weakref.ref(loaded.model)]
    del loaded
    closed.close()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
