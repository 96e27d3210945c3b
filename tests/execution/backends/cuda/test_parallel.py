"""Tensor parallelism over gloo: logits and texts equal a single process's, bits do not depend on the batch,
and ranks start and end with their worker."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from streamserve.baselines.speculation import parse_policy
from streamserve.engine.engine import Engine
from streamserve.execution.backends.cuda.collectives import Ranks
from streamserve.execution.backends.cuda.sharding import Shard
from streamserve.execution.loading.load import load
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.messages import DraftVerified, Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.controller import Speculation, default_cost
from tests.conftest import Scale
from tests.exact.speculating import edit

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "gemma2": {"sliding_window": 20, "query_pre_attn_scalar": 24},
    "mistral": {"sliding_window": 20},
    "qwen3": {},
    "granite": {
        "embedding_multiplier": 1.7, "residual_multiplier": 0.6, "attention_multiplier": 0.4,
        "logits_scaling": 0.9,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
}  # fmt: skip
PROMPTS = [[5, 80, 33, 9] * 9, [4, 90, 17], [12, 7] * 6]
Shared = Callable[..., Path]


@contextmanager
def engine_of(folder: Path, degree: int, **fields: Any) -> Iterator[Engine]:
    """Return an engine on `degree` ranks."""
    config = ModelConfig(
        path=str(folder), device="cpu", backend="device", threads=1, num_blocks=60, block_size=4,
        max_chunk=16, tensor_parallel_size=degree, max_model_len=100, check=True, **fields,
    )  # fmt: skip
    loaded = load(config)
    speculation = Speculation(parse_policy("fixed:3"), default_cost) if loaded.drafter else None
    yield Engine(
        loaded.engine_config, loaded.model_info, loaded.executor, lambda: 0.0, loaded.drafter, speculation
    )
    loaded.executor.close()


def generate(engine: Engine, prompts: list[list[int]], temperature: float = 0.0, tokens: int = 24) -> Any:
    """Return texts, the log-probabilities of all their tokens, and the number of accepted draft tokens."""
    for number, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=temperature, seed=len(prompt), max_tokens=tokens, ignore_eos=True, logprobs=0,
            prompt_logprobs=0,
        )  # fmt: skip
        engine.handle(Submit(str(number), prompt, params, outputs={0: []}, arrival=float(number)))
    result = SimpleNamespace(texts=[[] for _ in prompts], logprobs=[[] for _ in prompts], accepted=0)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Token):
                result.texts[int(event.request)].append(event.token)
                result.logprobs[int(event.request)].append(event.logprob)
            if isinstance(event, DraftVerified):
                result.accepted += event.accepted
    assert [len(text) for text in result.texts] == [tokens] * len(prompts)
    return result


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_texts_of_one_process(
    shared_checkpoint: Shared, name: str, degree: int, scale: Scale
) -> None:
    if not scale.full and (name, degree) != ("llama", 2):
        pytest.skip("with --full")
    folder = shared_checkpoint(name, **SIZES, **MODELS[name])
    with engine_of(folder, 1) as engine:
        expected = generate(engine, PROMPTS)
    options: dict[str, Any] = {"preempt_every": 5, "eviction": "swap", "swap_space": 0.01}
    with engine_of(folder, degree, draft="ngram", **options) as engine:
        found = generate(engine, PROMPTS)
        assert engine.report().preemptions > 0
        assert f"tensor parallel {degree}" in engine.model.numerics
        one_by_one = [generate(engine, [prompt], 1.0).texts[0] for prompt in PROMPTS]
        assert generate(engine, PROMPTS, 1.0).texts == one_by_one
    assert found.texts == expected.texts
    assert found.accepted > 0
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_a_rank_that_dies_ends_its_worker_and_the_other_ranks(shared_checkpoint: Shared) -> None:
    """A rank that dies ends its worker and the other ranks. The test runs in a separate process that may be
    lost."""
    folder = shared_checkpoint("llama", **SIZES)
    script = (
        "import sys, time; from streamserve.execution.loading.load import load\n"
        "from streamserve.protocol.config import ModelConfig\n"
        "place = {'device': 'cpu', 'backend': 'device', 'num_blocks': 40, 'tensor_parallel_size': 4}\n"
        "loaded = load(ModelConfig(path=sys.argv[1], **place))\n"
        "print(*loaded.executor._runner._children.process_ids, flush=True)\n"
        "time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        assert leader.stderr is not None
        ranks = [int(word) for word in leader.stdout.readline().split()]
        assert len(ranks) == 3
        os.kill(ranks[1], signal.SIGKILL)
        assert leader.wait(timeout=30) == 1
        assert "rank 2 of the model ended" in leader.stderr.read()  # returns when all ranks have ended


def test_a_rows_sum_over_ranks_does_not_depend_on_the_other_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(40, 30, generator=generator).bfloat16() for _ in range(4)]

    class Gathered(Ranks):
        def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [part[: len(x)] for part in parts]

    ranks = Gathered(0, 4, None)
    whole = ranks.add(parts[0])
    assert torch.equal(whole.float(), sum(part.double() for part in parts).bfloat16().float())
    for rows in (1, 2, 7, 39):
        assert torch.equal(ranks.add(parts[0][:rows]), whole[:rows])


def test_shards_are_the_whole() -> None:
    x = torch.arange(96.0).view(8, 12)
    shards = [Shard(rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat([shard.rows(x) for shard in shards]), x)
    assert torch.equal(torch.cat([shard.columns(x) for shard in shards], 1), x)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tensor_parallel_size": 3}, r"query heads \(8\) is not a multiple of 3"),
        ({"tensor_parallel_size": 8}, r"key-value heads \(4\) is not a multiple of 8"),
        ({"tensor_parallel_size": 2, "quantization": "int8"}, "--quantization int8:128 is not supported"),
        ({"tensor_parallel_size": 2, "draft": "self:1"}, "--draft self:1 is not supported"),
        ({"tensor_parallel_size": 2, "backend": "reference"}, "--tensor-parallel-size is for GPUs"),
    ],
)
def test_what_is_not_divided_is_refused_by_name(
    shared_checkpoint: Shared, fields: dict[str, Any], named: str
) -> None:
    folder = shared_checkpoint("llama", **SIZES)
    with pytest.raises(CheckpointError, match=named):
        load(ModelConfig(path=str(folder), num_blocks=40, **{"device": "cpu", "backend": "device", **fields}))


@pytest.mark.parametrize(("name", "reason"), [("olmo2", "one vector"), ("phi3", "joined matrices")])
def test_models_that_are_not_divided_are_refused(shared_checkpoint: Shared, name: str, reason: str) -> None:
    config = ModelConfig(
        path=str(shared_checkpoint(name)), device="cpu", backend="device", tensor_parallel_size=2
    )
    with pytest.raises(CheckpointError, match=reason):
        load(config)


def test_a_load_that_fails_leaves_no_rank_and_no_folder(
    shared_checkpoint: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that fails leaves no rank and no folder. The number that is not finite is in the leader's part,
    so the other rank waits for a leader."""
    folder, meeting = tmp_path / "model", tmp_path / "meeting"
    shutil.copytree(shared_checkpoint("llama", **SIZES), folder)
    meeting.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(meeting))
    spoil = "model.layers.0.self_attn.q_proj.weight"
    edit(
        folder,
        lambda name, tensor: tensor.index_fill(0, torch.tensor([0]), torch.nan) if name == spoil else tensor,
    )
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(CheckpointError, match="q_proj"), engine_of(folder, 2):
        pass
    assert {child.pid for child in psutil.Process().children()} <= before
    assert not list(meeting.iterdir())
