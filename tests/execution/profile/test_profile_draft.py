"""The cost of drafting is measured before requests are served, and leaves no state."""

from collections.abc import Callable
from pathlib import Path

import pytest

from streamserve.baselines.speculation import parse_policy
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.execution.loading.load import load
from streamserve.execution.profile.draft import draft_cost
from streamserve.protocol.config import ModelConfig
from streamserve.speculation.controller import Speculation


@pytest.mark.parametrize("draft", ["model", "self:1"])
def test_the_cost_of_a_level_is_measured(shared_checkpoint: Callable[..., Path], draft: str) -> None:
    folder = str(shared_checkpoint())
    draft_path = folder if draft == "model" else draft
    loaded = load(ModelConfig(path=folder, draft=draft_path, threads=1, num_blocks=12, max_model_len=50))
    cost = draft_cost(loaded)
    assert cost is not None
    assert cost.tokens == (1, 8), "the measured rows fit into the blocks"
    assert 0 < cost(1) <= cost(8)
    assert isinstance(loaded.drafter, ModelDrafter)
    assert not loaded.drafter._trees


@pytest.mark.parametrize("draft", ["ngram", "none"])
def test_a_drafter_without_a_model_has_no_cost(shared_checkpoint: Callable[..., Path], draft: str) -> None:
    folder = str(shared_checkpoint())
    loaded = load(ModelConfig(path=folder, draft=draft, threads=1, num_blocks=12, max_model_len=50))
    assert draft_cost(loaded) is None


def test_a_measured_cost_is_the_initial_estimate_of_drafting() -> None:
    def step(rows: int, kv_tokens: int) -> float:
        return 1.0

    policy = parse_policy("goodput")
    assert Speculation(policy, step, lambda rows: 0.25 * rows).pass_cost(2, 0) == 0.5
    assert Speculation(policy, step).pass_cost(2, 0) == 1 / 8
