"""Log-probabilities equal a plain softmax, ranks and ties are well defined, and slicing changes no result."""

import pytest
import torch

from streamserve.execution.compute.logprobs import token_logprobs


def test_entries_are_the_log_softmax_of_their_rows():
    logits = torch.randn(100, 23, generator=torch.Generator().manual_seed(0))
    tokens = [row % 23 for row in range(100)]
    slices = []

    def rows(part: slice) -> torch.Tensor:
        slices.append(part)
        return logits[part]

    entries = token_logprobs(rows, tokens, [row % 4 for row in range(100)])
    table = logits.log_softmax(-1)
    order = logits.argsort(-1, descending=True)
    assert len(slices) > 2  # The computation was sliced.
    for row, entry in enumerate(entries):
        assert entry.token == tokens[row]
        assert entry.logprob == pytest.approx(float(table[row, tokens[row]]), abs=1e-6)
        assert int(order[row, entry.rank - 1]) == tokens[row]
        assert [top.token for top in entry.top] == order[row, : row % 4].tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(
            table[row, order[row, : row % 4]].tolist(), abs=1e-6
        )


def test_equals_share_a_rank_and_are_listed_by_id():
    logits = torch.tensor([[1.0, 3.0, 0.0, 3.0]], dtype=torch.bfloat16)
    (entry,) = token_logprobs(lambda part: logits[part], [3], [3])
    assert entry.rank == 1
    assert [top.token for top in entry.top] == [1, 3, 0]


def test_no_request_computes_nothing():
    def fail(_: slice) -> torch.Tensor:
        raise AssertionError("no logits were needed")

    assert token_logprobs(fail, [], []) == []
