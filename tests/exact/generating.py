"""Models, cases and prompts whose texts are compared with transformers."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from streamserve.engine.engine import Engine
from streamserve.execution.loading.load import load
from streamserve.protocol.config import Backend, ModelConfig
from streamserve.protocol.messages import Admitted, Submit, Token
from streamserve.protocol.sampling import SamplingParams

MAX_OUTPUT = 64
MAX_PROMPT = 1500

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
    }},
    "mistral": {"sliding_window": 48, "head_dim": 16},
    "ministral3": {"head_dim": 16, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 128,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
    }},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "phi3": {"sliding_window": 300, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096,
        "factor": 8.0, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5], "long_factor": [3.0] * 8,
    }},
    "granite": {
        "embedding_multiplier": 1.7, "residual_multiplier": 0.6, "attention_multiplier": 0.4,
        "logits_scaling": 0.9,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo2": {},
    "olmo3": {"sliding_window": 48, "num_hidden_layers": 4},
    "gemma2": {
        "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 48, "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3_text": {
        "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 48, "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "qwen2_moe": {
        "num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80, "num_hidden_layers": 3, "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "head_dim": 32,
        "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 12, "num_experts_per_tok": 4, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 48},
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 48,
        "swiglu_limit": 1.5, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "truncate": False,
            "original_max_position_embeddings": 256,
        },
    },
    "glm4_moe": {
        "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "head_dim": 32,
        "num_hidden_layers": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """The settings of an engine, and the number of its concurrent requests."""

    chunk: int = 512
    concurrency: int = 3
    blocks: int = 1024
    preempt_every: int = 0
    longest: int = MAX_PROMPT


def make_engine(checkpoint: Path, case: Case, backend: Backend = "auto") -> Engine:
    config = ModelConfig(
        path=str(checkpoint), dtype="float32", backend=backend, threads=1, num_blocks=case.blocks,
        max_model_len=MAX_PROMPT + MAX_OUTPUT, max_num_seqs=32, max_num_batched_tokens=max(512, case.chunk),
        max_chunk=case.chunk, preempt_every=case.preempt_every,
    )  # fmt: skip
    loaded = load(config)
    return Engine(loaded.engine_config, loaded.model_info, loaded.executor, lambda: 0.0)


def make_prompts(rng: random.Random, count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Make prompts of 1 to `longest` tokens, half of them with a shared prefix."""
    head = [rng.randrange(4, vocabulary) for _ in range(longest // 2)]
    prompts = []
    for number in range(count):
        length = (1, longest)[number] if number < 2 else int(longest ** rng.random())
        prompt = [rng.randrange(4, vocabulary) for _ in range(max(1, length))]
        prompts.append((head + prompt)[:longest] if number % 2 else prompt)
    return prompts


@dataclass
class Outcome:
    """Each prompt's tokens with their log-probabilities, and the number of prompt tokens found in the
    cache."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: int = 0


def generate(engine: Engine, prompts: list[list[int]], params: SamplingParams, concurrency: int) -> Outcome:
    """Run all prompts, `concurrency` at a time, and assert that the engine is empty afterwards."""
    outcome = Outcome([[] for _ in prompts], [[] for _ in prompts])
    waiting, active = list(enumerate(prompts)), set()
    while waiting or active:
        while waiting and len(active) < concurrency:
            number, prompt = waiting.pop(0)
            seeded = msgspec.structs.replace(params, seed=number)
            engine.handle(Submit(str(number), prompt, seeded, outputs={0: []}, arrival=float(number)))
            active.add(number)
        for event in engine.step():
            if isinstance(event, Admitted):
                outcome.cached += event.cached
            if isinstance(event, Token):
                outcome.tokens[int(event.request)].append(event.token)
                if event.logprob is not None:
                    outcome.logprobs[int(event.request)].append(event.logprob)
                if event.finish:
                    active.discard(int(event.request))
    while engine.has_work:
        engine.step()
    assert engine.report().blocks_live == 0
    return outcome
