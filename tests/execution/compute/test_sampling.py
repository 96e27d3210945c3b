"""Sampling parameters are applied as in transformers and vLLM, and draws follow the resulting distribution
exactly."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.execution.compute.noise import gumbel
from streamserve.execution.compute.sampling import Row, Sampler, adjust, filtered_ids, highest
from streamserve.protocol.sampling import SamplingParams

VOCAB = 11
NO_TOKENS = np.array([], dtype=np.int64)


def random_logits(seed: int = 0, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 1.5


def row(params: SamplingParams, choice: int = 0, prompt=NO_TOKENS, outputs=(), logits: int = 0) -> Row:
    return Row(logits, params, choice, np.asarray(prompt, dtype=np.int64), list(outputs))


def by_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the scores that transformers computes with temperature, min_p, top_k and top_p; removed tokens
    have -inf."""
    from transformers.generation import logits_process as hf

    scores = hf.TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.min_p:
        scores = hf.MinPLogitsWarper(params.min_p)(None, scores)
    if params.top_k > 0:
        scores = hf.TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = hf.TopPLogitsWarper(params.top_p)(None, scores)
    return scores


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([2, 11, 300]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 4, 1000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
)
def test_filtered_ids_are_those_of_transformers(seed, vocab, temperature, min_p, top_k, top_p):
    params = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    logits = random_logits(seed, vocab=vocab)
    expected = by_transformers(logits, params)[0].isfinite().nonzero()[:, 0]
    ids = filtered_ids(logits[0].double().numpy() / temperature, params)
    assert ids.tolist() == expected.tolist()


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_covers_prompt_and_outputs_as_in_transformers(penalty):
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits, seen = random_logits(), [1, 4, 4, 7, 1, 9]
    scores = logits[0].double().numpy()
    adjust(scores, row(SamplingParams(repetition_penalty=penalty), prompt=[1, 4, 7], outputs=[1, 9]), ())
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), logits.double())[0].numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-12)
    assert {bool(logits[0, token] > 0) for token in seen} == {True, False}  # both kinds were there


def test_presence_and_frequency_penalties_count_outputs_alone():
    scores = np.zeros(VOCAB)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    adjust(scores, row(params, prompt=[2, 3], outputs=[3, 5, 5, 5]), ())
    expected = np.zeros(VOCAB)
    expected[3], expected[5] = -0.75, -1.25
    np.testing.assert_array_equal(scores, expected)


def test_logit_bias_is_added_before_penalties_and_min_tokens_has_the_last_word():
    scores = np.zeros(VOCAB)
    params = SamplingParams(logit_bias={1: 4.0, 3: 100.0}, repetition_penalty=2.0, min_tokens=1)
    adjust(scores, row(params, prompt=[1]), (3,))
    assert scores[1] == 2.0
    assert scores[3] == -np.inf


def test_only_allowed_tokens_keep_their_scores():
    logits = random_logits()
    scores = logits[0].double().numpy()
    params = SamplingParams(allowed_token_ids=(7, 2, 2), logit_bias={2: 1.0}, min_tokens=1, temperature=0.0)
    adjust(scores, row(params), (7,))
    assert scores[2] == logits[0, 2].double() + 1.0
    assert np.isneginf(np.delete(scores, 2)).all()
    assert Sampler(logits, (7,)).sample([row(params)]) == [2]


@pytest.mark.parametrize(
    ("ignore_eos", "outputs", "forbidden"),
    [(False, [], [5, 2, 3]), (True, [], [5]), (False, [1, 1], []), (False, [1], [5, 2, 3])],
)
def test_ends_are_forbidden_before_min_tokens(ignore_eos, outputs, forbidden):
    params = SamplingParams(min_tokens=2, stop_token_ids=(5,), ignore_eos=ignore_eos, temperature=0.0)
    assert row(params, outputs=outputs).forbidden((2, 3)) == forbidden
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 2, 3]] = torch.tensor([9.0, 8.0, 7.0])
    best = next(token for token in (5, 2, 3, 0) if token not in forbidden)
    assert Sampler(logits, (2, 3)).sample([row(params, outputs=outputs)]) == [best]


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_processed_distribution(limits):
    draws = 10_000
    params, logits = SamplingParams(seed=11, **limits), random_logits(3)
    expected = by_transformers(logits.double(), params)[0].softmax(-1).numpy()
    tokens = Sampler(logits, ()).sample([row(params, choice=choice) for choice in range(draws)])
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    chi_square = ((counts[likely] - draws * expected[likely]) ** 2 / (draws * expected[likely])).sum()
    freedom = likely.sum() - 1
    assert freedom >= 2
    # The mean is `freedom`, the standard deviation its root times √2. Six deviations never occur by chance.
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom)


def test_successive_outputs_of_one_request_are_independent_draws():
    params, logits = SamplingParams(seed=5), random_logits(4)
    rows = [row(params, outputs=[0] * index) for index in range(4000)]
    tokens = np.array(Sampler(logits, ()).sample(rows))
    probabilities = logits[0].double().softmax(-1).numpy()
    pairs = np.zeros((VOCAB, VOCAB))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    expected = np.outer(probabilities, probabilities) * (len(tokens) - 1)
    often = expected > 5
    chi_square = ((pairs - expected)[often] ** 2 / expected[often]).sum()
    assert often.sum() > 30
    assert chi_square < often.sum() + 6 * np.sqrt(2 * often.sum())


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 1000),
    scale=st.sampled_from([0.1, 3.0, 30.0, 300.0]),
)
def test_no_token_that_could_have_won_is_skipped(seed, index, scale):
    logits = random_logits(index, vocab=500).double() * scale
    everything = logits[0].numpy() + gumbel(seed, 2, index, np.arange(500))
    params = SamplingParams(seed=seed)
    tokens = Sampler(logits, ()).sample([row(params, choice=2, outputs=[0] * index)])
    assert tokens == [everything.argmax()]


def test_a_row_draws_the_same_alone_and_among_others():
    kinds = [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.5},
        {"repetition_penalty": 1.5, "temperature": 0.0},
    ]
    logits = random_logits(5, rows=40)
    rows = [
        row(SamplingParams(seed=index, **kinds[index % 5]), index % 3, [1, 2], range(index % 4), logits=index)
        for index in range(40)
    ]
    sampler = Sampler(logits, (0,))
    together = sampler.sample(rows)
    assert together == [
        Sampler(logits[sample_row.logits : sample_row.logits + 1], (0,)).sample([alone(sample_row)])[0]
        for sample_row in rows
    ]
    assert len(set(together)) > 3


def alone(sample_row: Row) -> Row:
    return Row(0, sample_row.params, sample_row.choice, sample_row.prompt, sample_row.outputs)


def test_seed_choice_and_index_each_change_the_draw():
    logits = torch.zeros(1, 1000)
    sampler = Sampler(logits, ())
    base = {"choice": 0, "outputs": [1]}
    params = SamplingParams(seed=1)
    rows = [
        row(params, **base),
        row(SamplingParams(seed=2), **base),
        row(params, choice=1, outputs=[1]),
        row(params, choice=0, outputs=[1, 1]),
    ]
    assert len(set(sampler.sample(rows))) == 4
    assert sampler.sample(rows) == sampler.sample(rows)


@pytest.mark.parametrize("bias", [{}, {0: 0.0}], ids=["all rows at once", "row by row"])
def test_greedy_takes_the_lowest_of_equals(bias):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0]], dtype=torch.bfloat16)
    params = SamplingParams(temperature=0.0, logit_bias=bias)
    assert Sampler(logits, ()).sample([row(params), row(params, logits=1)]) == [1, 0]


def test_of_equal_scores_lower_ids_remain():
    scores = np.array([1.0, 2.0, 1.0, 2.0, 1.0])
    assert filtered_ids(scores, SamplingParams(top_k=3)).tolist() == [0, 1, 3]
    assert filtered_ids(scores, SamplingParams(top_k=1)).tolist() == [1]
    assert filtered_ids(np.zeros(4), SamplingParams(top_p=0.5)).tolist() == [0, 1]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(0, 40))
def test_highest_orders_by_score_then_index(scores, count):
    expected = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count]
    assert highest(np.array(scores, dtype=float), count).tolist() == expected


def test_when_every_token_is_forbidden_one_is_still_chosen():
    params = SamplingParams(seed=1, min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    assert Sampler(random_logits(), ()).sample([row(params)]) == [0]


def test_a_sampled_request_without_a_seed_is_an_error():
    with pytest.raises(ValueError, match="seed"):
        Sampler(random_logits(), ()).sample([row(SamplingParams())])
