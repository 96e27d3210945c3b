"""Numbers that are not finite end only the sequence that they belong to; other texts do not change."""

from pathlib import Path

import numpy as np
import pytest
import torch

from streamserve.contracts.plan import DraftRequest, SequenceState, Span, StepPlan
from streamserve.contracts.tree import chain, root
from streamserve.execution.backends.native.library import ThreadPool, kernels
from streamserve.execution.backends.native.sampling import NativeChooser, NativeDraftSelector
from streamserve.execution.compute.draft_selection import select_draft_tokens
from streamserve.execution.compute.executor import TorchExecutor
from streamserve.execution.compute.sampling import NOT_FINITE, NotFiniteError, Row, Sampler, finite_rows
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.execution.loading.load import load, make_drafter
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.sampling import SamplingParams
from tests.execution.drive import BLOCK_SIZE, NUM_BLOCKS, Task, run_alone
from tests.overflowing import TOKEN, make_overflowing

GREEDY = SamplingParams(temperature=0.0)
KINDS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, top_k=20, seed=17),
    "penalized": SamplingParams(temperature=1.2, seed=3, repetition_penalty=1.4),
    "masked": SamplingParams(temperature=0.0, allowed_token_ids=[5, 6, 7]),
}
BACKENDS = ["native", "reference"] if kernels() else ["reference"]
VALUES = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def folder(request, tmp_path_factory) -> Path:
    return make_overflowing(tmp_path_factory.mktemp("overflowing"), request.param)


def loaded(folder: Path, backend: str, **settings: str):
    return load(
        ModelConfig(
            path=str(folder),
            threads=1,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            backend=backend,
            **settings,
        )
    )


def run(executor: TorchExecutor, spans: list[Span], params: SamplingParams = GREEDY):
    """Run one step of new sequences, which are then forgotten."""
    states = [SequenceState(span.sequence, 0, params, span.tokens, []) for span in spans]
    results = executor.run(StepPlan(0, states, [], [], spans)).spans
    executor.run(StepPlan(1, [], [span.sequence for span in spans], [], []))
    return results


@pytest.mark.each_pair
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_only_the_sequence_with_the_bad_token_ends(folder, backend, kind, kv):
    executor, params = loaded(folder, backend, kv_cache_dtype=kv).executor, KINDS[kind]
    good, bad = [9, 8, 7, 6, 5], [9, 8, TOKEN, 6]
    alone = run_alone(executor, Task(good, params), 4)
    spans = [
        Span(1, 0, good, [0, 1], root(good[-1]), (0,)),
        Span(2, 0, bad, [2], root(bad[-1]), (0,)),
        Span(3, 0, bad, [3]),  # a chunk without sampled tokens: its KV is not finite either
    ]
    first, second, third = run(executor, spans, params)
    assert [sampled.token for sampled in first.outputs[0]] == alone[:1]
    assert (first.not_finite, second.not_finite, third.not_finite) == (False, True, True)
    assert second.outputs == []
    assert run_alone(executor, Task(good, params), 4) == alone, "freed blocks are never read"


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_logprobs_are_checked(folder, backend):
    executor = loaded(folder, backend).executor
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    (result,) = run(executor, [Span(1, 0, [9, TOKEN, 6], [0], None, (), 1)], params)
    assert (result.not_finite, result.prompt_logprobs) == (True, [])


@pytest.mark.skipif(not kernels(), reason="plain torch multiplies hidden columns by zero weights")
def test_a_wrong_draft_token_that_overflows_changes_nothing(folder):
    executor = loaded(folder, "native").executor
    prompt = [9, 8, 7, 6, 5]
    plain = run_alone(executor, Task(prompt, GREEDY), 12)
    task = Task(prompt, GREEDY, draft=lambda token, done: chain([token, TOKEN, 5]))
    assert run_alone(executor, task, 12) == plain


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("native", [True, False] if kernels() else [False])
def test_no_token_comes_of_a_row_that_is_not_finite(native, kind, value):
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 4001)).astype(np.float32))
    logits[1, 2777] = VALUES[value]
    chooser = NativeChooser(ThreadPool(kernels(), 1)) if native else None
    rows = [Row(row, KINDS[kind], 0, np.array([4]), []) for row in (0, 1)]
    sampler = Sampler(logits, (), chooser)
    first, second = sampler.sample(rows)
    assert 0 <= first < 4001
    assert second == NOT_FINITE
    assert finite_rows(logits).tolist() == [True, False]
    with pytest.raises(NotFiniteError):
        sampler.distribution(rows[1])


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("native", [True, False] if kernels() else [False])
def test_nothing_is_drafted_after_a_row_that_is_not_finite(native, kind, value):
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 4001)).astype(np.float32))
    logits[1, 2777] = VALUES[value]
    selector = NativeDraftSelector(ThreadPool(kernels(), 1)) if native else select_draft_tokens
    first, second = selector(logits, [KINDS[kind]] * 2, [0, 0], [0, 0], 3)
    assert len(first) == 3
    assert second == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_model_that_overflows_gives_no_tree(folder, backend):
    drafter = make_drafter(loaded(folder, backend))
    assert isinstance(drafter, ModelDrafter)

    def make_request(id: int, tokens: list[int]) -> DraftRequest:
        return DraftRequest(id, 0, tokens, len(tokens), 0, 0, GREEDY, 3, 2, 6, 0, [2 * id, 2 * id + 1])

    drafter.begin([make_request(0, [9, 8, 7])])
    (alone,) = drafter.collect(0.0).values()
    drafter.release([0])
    drafter.begin([make_request(0, [9, 8, 7]), make_request(1, [9, TOKEN, 7])])
    together = drafter.collect(0.0)
    assert together.keys() == {0}
    assert together[0].tokens[:2] == alone.tokens[:2]
