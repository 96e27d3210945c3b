"""Prompt streams, swapping and speculation on real models: the output is the output of the final prompt."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from streamserve.baselines.speculation import parse_policy
from streamserve.engine.engine import Engine
from streamserve.execution.loading.load import load
from streamserve.protocol.config import Eviction, ModelConfig
from streamserve.protocol.messages import Submit
from streamserve.speculation.controller import Speculation
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.engine.drive import Collected
from tests.engine.edits import StreamClient, run_scripts

LONGEST = 60


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two models with equal weights, so that draft tokens are often accepted, as far as sampling
    permits."""
    folders = [make_checkpoint(tmp_path_factory.mktemp(name)) for name in ("target", "draft")]
    return folders[0], folders[1]


def make_engine(
    pair: tuple[Path, Path], squeezed: bool, eviction: Eviction = "cost", draft: str = "none"
) -> Engine:
    loaded = load(
        ModelConfig(
            path=str(pair[0]), dtype="float32", threads=1, block_size=4, num_blocks=26 if squeezed else 400,
            max_model_len=96, max_num_seqs=8, max_num_batched_tokens=64, max_chunk=16, eviction=eviction,
            swap_space=0.01 if squeezed and eviction != "recompute" else 0.0,
            preempt_every=7 if squeezed else 0, draft=str(pair[1]) if draft == "model" else draft,
        )
    )  # fmt: skip
    ticks = iter(range(10**9))
    policy = parse_policy("fixed-tree:2x3" if draft == "self:1" else "fixed:3")
    return Engine(
        loaded.engine_config, loaded.model_info, loaded.executor, lambda: float(next(ticks)), loaded.drafter,
        Speculation(policy, lambda rows, kv_tokens: 1.0 + rows / 64),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("eviction", "draft"), [("swap", "model"), ("cost", "model"), ("cost", "self:1"), ("recompute", "self:1")]
)
def test_any_script_gives_the_text_of_its_final_prompt(
    pair: tuple[Path, Path], eviction: Eviction, draft: str, scale: Scale, record: Callable[..., None]
) -> None:
    rng, total = random.Random(scale.seed), Counter()
    plain = make_engine(pair, squeezed=False)
    while total["scripts"] < scale.pick(20, 200):
        engine = make_engine(pair, squeezed=True, eviction=eviction, draft=draft)
        clients = [StreamClient(rng, number, LONGEST) for number in range(10)]
        count, collected = run_scripts(rng, engine, clients)
        expected = Collected()
        for client in clients:
            outputs: dict[int, list[int]] = {choice: [] for choice in range(client.params.n)}
            plain.handle(Submit(client.name, client.prompt, client.params, outputs=outputs))
            while plain.has_work:
                expected.take(plain.step())
        assert collected.tokens == expected.tokens
        assert collected.finish == expected.finish
        total += count + Counter(accepted=engine.speculation.counters.accepted)
        engine.executor.close()
    record(**total)
    swapped = () if eviction == "recompute" else ("swaps", "swapped_back")
    for what in ("mid_step", "invalidated", "withdrawn", "copies", "accepted", *swapped):
        assert total[what] > 0, what
