"""The model spec for tests of the KV cache and of attention."""

from streamserve.execution.model.rope_spec import RopeSpec
from streamserve.execution.model.spec import ModelSpec, Multipliers

LAYERS, BLOCKS, HEADS, SLOTS, DIM = 2, 6, 3, 4, 8
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=48,
    intermediate_size=8,
    num_layers=LAYERS,
    num_heads=6,
    num_kv_heads=HEADS,
    head_dim=DIM,
    rms_norm_eps=1e-6,
    rotary_dim=DIM,
    ropes=(RopeSpec(10_000.0),) * LAYERS,
    windows=(None, None),
    max_position_embeddings=64,
    tied_embeddings=False,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    multipliers=Multipliers(DIM**-0.5),
    dtype=None,
    eos_token_ids=(),
)
