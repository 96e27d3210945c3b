"""Draft tokens can be verified on the device before the host knows them."""

import time
from pathlib import Path
from typing import Any

import pytest

from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.plan import StepPlan
from streamserve.engine import drafting
from streamserve.engine.engine import Engine
from streamserve.execution.backends.cuda.warm_up import capture
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.execution.loading.load import load
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.messages import DraftVerified, Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.controller import Speculation, default_cost

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)


class Run:
    """The texts of three requests, and the draft tokens that were drafted and accepted for them. `draft`: a
    model's folder, or a drafter as in --draft."""

    def __init__(
        self, folder: Path, draft: str, policy: str, params: SamplingParams = GREEDY, captured: bool = False
    ) -> None:
        config = ModelConfig(
            path=str(folder), draft=draft, backend="device", threads=1, dtype="float32", block_size=4,
            num_blocks=200, max_model_len=128,
        )  # fmt: skip
        loaded = load(config)
        executor: Any = loaded.executor
        runners = [executor._runner]
        if isinstance(loaded.drafter, ModelDrafter):
            runners.append(loaded.drafter._passes)
        if captured:
            capture(runners[0], 8, loaded.drafter)
        known = {shape for runner in runners for shape in runner.graphs.shapes}
        self.speculation = Speculation(parse_policy(policy), default_cost)
        self.engine = Engine(
            loaded.engine_config, loaded.model_info, loaded.executor, time.perf_counter, loaded.drafter,
            self.speculation,
        )  # fmt: skip
        self.plans: list[StepPlan] = []
        self.texts: dict[str, list[int]] = {}
        self.accepted = 0
        self.drafter = loaded.drafter
        self._note_plans(loaded.executor)
        for number in range(3):
            prompt = [5 + number, 9, 4 + number] * (number + 1)
            self.engine.handle(Submit(str(number), prompt, params, outputs={0: []}))
        while self.engine.has_work:
            for event in self.engine.step():
                if isinstance(event, Token):
                    self.texts.setdefault(event.request, []).append(event.token)
                if isinstance(event, DraftVerified):
                    self.accepted += event.accepted
        self.new_shapes = [
            shape for runner in runners for shape in runner.graphs.shapes if shape not in known
        ]

    def _note_plans(self, executor: Any) -> None:
        launch = executor.launch

        def noting(plan: StepPlan) -> None:
            self.plans.append(plan)
            launch(plan)

        executor.launch = noting

    @property
    def followed(self) -> int:
        """Return the number of chains that were drafted before the preceding tokens were known."""
        assert isinstance(self.drafter, ModelDrafter)
        return self.drafter.followed

    @property
    def unknown(self) -> int:
        """Return the number of draft tokens that were verified before they were known."""
        trees = [span.tree for plan in self.plans for span in plan.spans if span.tree]
        return sum(token < 0 for tree in trees for token in tree.tokens)


@pytest.mark.parametrize("policy", ["fixed:4", "fixed:1"])
def test_chains_are_verified_before_they_are_known(shared_checkpoint: Any, policy: str) -> None:
    folder = shared_checkpoint("llama")
    plain, drafted = Run(folder, "none", "off"), Run(folder, str(folder), policy)
    assert drafted.texts == plain.texts
    assert drafted.unknown > 0
    counters = drafted.speculation.counters
    assert drafted.accepted > 0.8 * counters.verified, "the draft model is the target"
    assert drafted.followed > 0.5 * counters.drafts / 3, "the device began before the host knew the tokens"
    assert counters.verified > 0
    assert counters.drafts > 0
    assert all(token >= 0 for text in drafted.texts.values() for token in text)


def test_the_first_layers_of_the_target_are_verified_before_they_are_known(shared_checkpoint: Any) -> None:
    folder = shared_checkpoint("llama")
    plain, drafted = Run(folder, "none", "off"), Run(folder, "self:1", "fixed:3")
    assert drafted.texts == plain.texts
    assert drafted.unknown > 0


def test_what_was_accepted_is_learned(shared_checkpoint: Any) -> None:
    """Accepted draft tokens are learned from: a model that drafts for itself is always right, so calibrated
    acceptance rises."""
    folder = shared_checkpoint("llama")
    drafted = Run(folder, str(folder), "fixed:4")
    levels = drafted.speculation.level_acceptance.by_width()[0]
    assert levels[0] > 0.8
    assert drafted.speculation.counters.accepted == drafted.accepted


def test_trees_and_sampled_requests_are_collected_first(shared_checkpoint: Any) -> None:
    folder = shared_checkpoint("llama")
    at_the_end = 3
    """A request with two tokens left has a tree of one node, which is a chain."""
    assert Run(folder, str(folder), "fixed-tree:2x2").unknown <= at_the_end
    plain = Run(folder, "none", "off", SAMPLED)
    drafted = Run(folder, str(folder), "fixed:4", SAMPLED)
    assert drafted.unknown == 0
    assert drafted.texts == plain.texts


@pytest.mark.parametrize("draft", ["self:1", "other"])
@pytest.mark.parametrize("policy", ["fixed:1", "fixed:3", "fixed:6"])
def test_what_is_drafted_ahead_is_what_is_drafted_afterwards(
    shared_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, policy: str, draft: str
) -> None:
    """Drafting ahead gives the same draft tokens as drafting afterwards. The drafts are seldom right, so the
    number of accepted tokens differs between chains."""
    folder = shared_checkpoint("llama")
    draft = str(shared_checkpoint("llama", num_hidden_layers=1)) if draft == "other" else draft
    ahead = Run(folder, draft, policy)
    monkeypatch.setattr(drafting, "DRAFT_AHEAD", False)
    after = Run(folder, draft, policy)
    assert ahead.followed > 0 == after.followed
    assert ahead.texts == after.texts
    assert ahead.accepted == after.accepted
    assert ahead.speculation.counters.accepted_at == after.speculation.counters.accepted_at
    assert ahead.unknown == after.unknown


def test_chains_are_captured_before_there_are_requests(shared_checkpoint: Any) -> None:
    """Chains are captured before there are requests: later steps of few sequences compile and capture nothing
    that padding did not."""
    folder = shared_checkpoint("llama")
    warm, cold = Run(folder, str(folder), "fixed:4", captured=True), Run(folder, str(folder), "fixed:4")
    assert warm.texts == cold.texts
    assert warm.accepted == cold.accepted
    assert warm.new_shapes == []
    assert cold.new_shapes
