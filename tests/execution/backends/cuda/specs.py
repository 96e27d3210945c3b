"""Model specs of the CUDA engine's tests."""

from dataclasses import replace

from streamserve.execution.model.experts import Experts
from streamserve.execution.model.rope_spec import RopeSpec
from streamserve.execution.model.spec import ModelSpec, Multipliers

SPEC = ModelSpec(
    architecture="LlamaForCausalLM", vocab_size=300, hidden_size=64, intermediate_size=96, num_layers=3,
    num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, rotary_dim=16,
    ropes=(RopeSpec(10_000.0),) * 3, windows=(None, 24, None), multipliers=Multipliers(0.25),
    max_position_embeddings=1024, tied_embeddings=False, qkv_bias=False, out_bias=False, mlp_bias=False,
    dtype="float32", eos_token_ids=(299,),
)  # fmt: skip
MIXTURE = replace(
    SPEC, experts=Experts((0, 2), count=4, chosen=2, intermediate_size=64, normalized=True, shared_size=32)
)
AROUND = replace(
    SPEC, norms="around", wide_norms=True, norm_offset=1.0, qk_norm="heads", activation="gelu_pytorch_tanh",
    attention_cap=20.0, logits_cap=15.0, rotary_dim=8, ropes=(None, RopeSpec(10_000.0), RopeSpec(5_000.0)),
)  # fmt: skip
