"""Chains that a device drafts in a single launch equal chains that are drafted level by level."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamserve.contracts.plan import DRAFT, DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.execution.loading.load import load
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.sampling import SamplingParams
from tests.conftest import Scale

GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 4
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 6, "num_hidden_layers": 2},
    "phi3": {"sliding_window": 5},
}


def make_drafters(folder: Path) -> tuple[ModelDrafter, ModelDrafter]:
    """Return a drafter with device chains and one without, on two copies of a model."""
    drafters = []
    for _ in range(2):
        config = ModelConfig(
            path=str(folder), draft=str(folder), backend="device", threads=1, dtype="float32",
            block_size=BLOCK_SIZE, num_blocks=200,
        )  # fmt: skip
        drafter = load(config).drafter
        assert isinstance(drafter, ModelDrafter)
        drafters.append(drafter)
    return drafters[0], ModelDrafter(drafters[1]._passes, drafters[1].cache, DRAFT)


def make_requests(rng: random.Random, count: int, surely: bool) -> list[DraftRequest]:
    """Return requests with texts, depths and read prefixes of many lengths. Chains of requests with `surely`
    continue after unlikely tokens; the others end there."""
    requests, free = [], list(range(1, 190))
    rng.shuffle(free)
    for number in range(count):
        length, depth = rng.randint(1, 30), rng.randint(1, 9)
        tokens = [rng.randrange(4, 300) for _ in range(length)]
        blocks = [free.pop() for _ in range(-(-(length + depth) // BLOCK_SIZE))]
        nodes = rng.choice((depth, depth, max(1, depth - 2)))
        expansion = (1,) * depth if surely else ()
        requests.append(
            DraftRequest(
                number, 0, tokens, length, 0, 0, GREEDY, depth, 1, nodes, 0, blocks, expansion=expansion
            )
        )
    return requests


def shape(tree: TokenTree) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tree.tokens, tree.parents


@pytest.mark.parametrize("name", MODELS)
def test_chains_are_those_of_level_by_level(
    shared_checkpoint: Callable[..., Path], name: str, scale: Scale
) -> None:
    rng = random.Random(scale.seed)
    together, apart = make_drafters(shared_checkpoint(name, **MODELS[name]))
    longest = 0
    for trial in range(scale.pick(6, 40)):
        requests = make_requests(rng, rng.randint(1, 9), surely=trial % 3 > 0)
        for drafter in (together, apart):
            drafter.begin(requests)
        found, expected = together.collect(0.0), apart.collect(0.0)
        assert found.keys() == expected.keys() == set(range(len(requests)))
        for id, tree in expected.items():
            assert shape(found[id]) == shape(tree)
            assert found[id].accept == pytest.approx(tree.accept, rel=1e-3)
            longest = max(longest, len(tree) - 1)
        # Accepted tokens are read again, so the next chains begin in the middle of a text.
        grown = [
            DraftRequest(
                one.id, 0, [*one.tokens, 7], one.length + 1, 0, 1, GREEDY, one.depth, 1, one.depth,
                one.length, [*one.blocks, 190 + one.id], expansion=one.expansion,
            )
            for one in requests
        ]  # fmt: skip
        for drafter in (together, apart):
            drafter.begin(grown)
        assert {id: shape(tree) for id, tree in together.collect(0.0).items()} == {
            id: shape(tree) for id, tree in apart.collect(0.0).items()
        }
        for drafter in (together, apart):
            drafter.release(range(len(requests)))
    assert longest == 9
    assert together.chains_drafted > 0
    assert apart.chains_drafted == 0


@pytest.mark.parametrize(
    "changed", [{"temperature": 0.7, "seed": 3}, {"temperature": 0.0, "frequency_penalty": 1.0}]
)
def test_a_batch_with_another_kind_of_request_is_drafted_level_by_level(
    shared_checkpoint: Callable[..., Path], changed: dict[str, Any]
) -> None:
    together, _ = make_drafters(shared_checkpoint("llama"))
    plain, other = make_requests(random.Random(0), 2, surely=True)
    together.begin([plain, replace(other, params=SamplingParams(**changed))])
    assert together.collect(0.0).keys() == {0, 1}
    assert together.chains_drafted == 0
