"""The spec of a model in GGUF files, from its metadata and the types of its tensors. A model that cannot be
computed exactly is refused by the entry's name, and so are unknown entries for its architecture."""

import numpy as np

from streamserve.execution.architectures import ARCHITECTURES
from streamserve.execution.experts import MAX_ALL_EXPERTS, MAX_EXPERTS, Experts
from streamserve.execution.gguf.blocks import FORMATS
from streamserve.execution.gguf.names import EMBEDDING, HEAD, ROPE_FREQUENCIES, layer_tensor, part_name
from streamserve.execution.quantization import common_format
from streamserve.execution.rope_spec import MAX_THETA, RopeSpec
from streamserve.execution.spec import MAX_LAYERS, ModelSpec, Multipliers, linear_names
from streamserve.execution.stored.formats import GgufBlocks, StoredFormats, joined
from streamserve.gguf.files import GgufModel
from streamserve.gguf.metadata import Metadata, shown
from streamserve.protocol.errors import CheckpointError

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
MIXTURES = {"llama": True, "qwen2moe": False, "qwen3moe": True}
"""Those that may have experts, and whether the weights of a token's experts are divided by their sum, where
the file does not say it."""
SOFTMAX = 1
"""The function that makes weights of an expert's scores, as GGUF numbers it."""

PERMUTED = ("llama", "mistral")
"""Architectures whose rotary embedding pairs neighbours: the rows of their queries and keys are in another
order than ours."""

KNOWN = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "attention.sliding_window", "attention.causal",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_count", "expert_used_count",
    "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_weights_norm",
    "expert_gating_func",
    "tensor_data_layout", "pooling_type",
}  # fmt: skip
"""Entries of an architecture that are honoured, or change nothing."""

BLOCK_VERSION = 2
"""The version of the layout of blocks since GGUF exists."""

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

END_OF_TEXT = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>",
}  # fmt: skip
"""Control tokens that end a text in any model that has them, as llama.cpp knows them by name."""
CONTROL = 3


def read_spec(model: GgufModel) -> ModelSpec:
    """Return the spec of a model. Raises CheckpointError naming the file and the entry or tensor."""
    metadata = model.metadata
    family = metadata.text("general.architecture")
    if family not in FAMILIES:
        metadata.refuse(
            "general.architecture", f"{family!r:.80} is not supported (supported: {', '.join(FAMILIES)})"
        )
    _check_kind(metadata)
    entry = f"{family}.".__add__
    _refuse_unknown(metadata, family)
    hidden, heads = (
        metadata.integer(entry("embedding_length")),
        metadata.integer(entry("attention.head_count")),
    )
    layers = metadata.integer(entry("block_count"), maximum=MAX_LAYERS)
    head_dim = _head_dim(metadata, family, hidden, heads)
    kv_heads = metadata.integer(entry("attention.head_count_kv"), heads)
    if heads % kv_heads:
        metadata.refuse(entry("attention.head_count"), f"must be a multiple of {kv_heads} key-value heads")
    window = _window(metadata, family)
    experts = _experts(model, family, layers)
    name = "MistralForCausalLM" if window else FAMILIES[family]
    if experts and family == "llama":
        name = "MixtralForCausalLM"
    vocab_size = _vocab_size(model, family)
    tied = HEAD not in model.tensors
    stored = _stored_formats(model, [linear_names(False, experts, layer) for layer in range(layers)])
    return ModelSpec(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=metadata.integer(
            entry("feed_forward_length"), experts.intermediate_size if experts else None
        ),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=metadata.number(entry("attention.layer_norm_rms_epsilon"), maximum=1.0),
        rotary_dim=head_dim,
        ropes=(_rope(model, family, head_dim),) * layers,
        windows=(window,) * layers,
        max_position_embeddings=metadata.integer(entry("context_length")),
        tied_embeddings=tied,
        qkv_bias=layer_tensor(0, "attn_q.bias") in model.tensors,
        out_bias=layer_tensor(0, "attn_output.bias") in model.tensors,
        mlp_bias=layer_tensor(0, "ffn_gate.bias") in model.tensors,
        multipliers=Multipliers(head_dim**-0.5),
        dtype=_dtype(model, stored),
        eos_token_ids=_eos_token_ids(metadata, vocab_size),
        qk_norm=ARCHITECTURES[name].qk_norm,
        stored=stored,
        experts=experts,
    )


def _check_kind(metadata: Metadata) -> None:
    """Raise CheckpointError for files that hold no model, or blocks of a former layout."""
    kind = metadata.text("general.type", "model")
    if kind != "model":
        metadata.refuse("general.type", f"{shown(kind)} is not supported: only models are")
    version = metadata.integer("general.quantization_version", BLOCK_VERSION, minimum=0)
    if version != BLOCK_VERSION:
        metadata.refuse(
            "general.quantization_version", f"{version} is not supported (supported: {BLOCK_VERSION})"
        )


def _refuse_unknown(metadata: Metadata, family: str) -> None:
    """Raise CheckpointError for entries that mean another computation."""
    for key in metadata.entries:
        if key.startswith(f"{family}.") and key.removeprefix(f"{family}.") not in KNOWN:
            metadata.refuse(key, "is not supported")
    if not metadata.flag(f"{family}.attention.causal", True):
        metadata.refuse(f"{family}.attention.causal", "false is not supported")
    layout = metadata.text(f"{family}.tensor_data_layout", "reference")
    if layout not in ("reference", "Meta AI original pth"):
        metadata.refuse(f"{family}.tensor_data_layout", f"{shown(layout)} is not supported")


def _experts(model: GgufModel, family: str, layers: int) -> Experts | None:
    """Return the mixture of experts that every layer has; None without one."""
    metadata, entry = model.metadata, f"{family}.".__add__
    count = metadata.integer(entry("expert_count"), 0, minimum=0, maximum=MAX_EXPERTS)
    if count == 0:
        if family.endswith("moe"):
            metadata.refuse(entry("expert_count"), "is missing")
        return None
    if family not in MIXTURES:
        metadata.refuse(entry("expert_count"), "is not supported: this architecture has no experts")
    if count * layers > MAX_ALL_EXPERTS:
        metadata.refuse(
            entry("expert_count"),
            f"{count} in {layers} layers: at most {MAX_ALL_EXPERTS} in all are supported",
        )
    if metadata.integer(entry("expert_gating_func"), SOFTMAX) != SOFTMAX:
        metadata.refuse(entry("expert_gating_func"), f"is not supported (supported: {SOFTMAX}, softmax)")
    shared = ARCHITECTURES[FAMILIES[family]].mixture
    return Experts(
        layers=tuple(range(layers)),
        count=count,
        chosen=metadata.integer(entry("expert_used_count"), maximum=count),
        intermediate_size=_outputs(model, "ffn_gate_exps", 1, entry("expert_feed_forward_length")),
        normalized=metadata.flag(entry("expert_weights_norm"), MIXTURES[family]),
        shared_size=_outputs(model, "ffn_gate_shexp", 0, entry("expert_shared_feed_forward_length"))
        if shared and shared.shared
        else 0,
    )


def _outputs(model: GgufModel, name: str, dimension: int, key: str) -> int:
    """Return the outputs of a matrix of the first layer, which the entry `key` may give too."""
    info = model.tensors.get(layer_tensor(0, f"{name}.weight"))
    if info is None or len(info.shape) != dimension + 2:
        raise CheckpointError(f"{model.path}: {layer_tensor(0, name)}.weight is missing, or not one tensor")
    size = info.shape[dimension]
    if model.metadata.integer(key, size) != size:
        model.metadata.refuse(key, f"contradicts the {size} outputs of {layer_tensor(0, name)}.weight")
    return size


def _head_dim(metadata: Metadata, family: str, hidden: int, heads: int) -> int:
    key = f"{family}.attention.key_length"
    if key not in metadata and hidden % heads:
        metadata.refuse(f"{family}.embedding_length", f"{hidden} is not a multiple of {heads} heads")
    head_dim = metadata.integer(key, max(1, hidden // heads))
    if head_dim % 2:
        metadata.refuse(key, f"must be even for rotary embeddings, not {head_dim}")
    for name in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(f"{family}.{name}", head_dim) != head_dim:
            metadata.refuse(f"{family}.{name}", f"other than the {head_dim} of a key is not supported")
    return head_dim


def _window(metadata: Metadata, family: str) -> int | None:
    """Return the window of every layer's attention."""
    key = f"{family}.attention.sliding_window"
    window = metadata.integer(key, 0, minimum=0)
    if window and family not in PERMUTED:
        metadata.refuse(key, "is not supported: the file does not say in which layers")
    return window or None


def _rope(model: GgufModel, family: str, head_dim: int) -> RopeSpec:
    metadata = model.metadata
    theta = metadata.number(f"{family}.rope.freq_base", 10_000.0, 1.0, MAX_THETA)
    key = f"{family}.rope.scaling.type"
    kind = metadata.text(key, "none")
    if kind not in ("none", "linear"):
        metadata.refuse(key, f"{shown(kind)} is not supported (supported: 'none', 'linear')")
    if ROPE_FREQUENCIES in model.tensors:
        if kind != "none" or family not in PERMUTED:
            metadata.refuse(ROPE_FREQUENCIES, f"is not supported for {family} with scaling {kind!r}")
        return RopeSpec(theta, "factors", factors=_rope_factors(model, head_dim // 2))
    if kind == "linear":
        return RopeSpec(
            theta, "linear", metadata.number(f"{family}.rope.scaling.factor", None, 1.0, MAX_THETA)
        )
    return RopeSpec(theta)


def _rope_factors(model: GgufModel, count: int) -> tuple[float, ...]:
    """Return by what each pair's frequency is divided."""
    info = model.tensors[ROPE_FREQUENCIES]
    if info.type.name != "F32" or info.shape != (count,):
        model.metadata.refuse(
            ROPE_FREQUENCIES, f"must be F32 [{count}], not {info.type.name} {list(info.shape)}"
        )
    factors = np.frombuffer(model.stored(ROPE_FREQUENCIES).tobytes(), "<f4")
    if not ((factors >= 1e-6) & (factors <= MAX_THETA)).all():
        model.metadata.refuse(ROPE_FREQUENCIES, "must hold positive numbers")
    return tuple(factors.tolist())


def _vocab_size(model: GgufModel, family: str) -> int:
    """Return the rows of the embedding, of which the tokenizer's tokens are the first."""
    if EMBEDDING not in model.tensors:
        raise CheckpointError(f"{model.path}: no file holds tensor {EMBEDDING}")
    size = model.tensors[EMBEDDING].shape[0]
    metadata, tokens = model.metadata, "tokenizer.ggml.tokens"
    if metadata.integer(f"{family}.vocab_size", size) != size:
        metadata.refuse(f"{family}.vocab_size", f"contradicts the {size} rows of {EMBEDDING}")
    if tokens in metadata and len(metadata.texts(tokens)) > size:
        metadata.refuse(tokens, f"has more tokens than the {size} rows of {EMBEDDING}")
    return size


def _stored_formats(model: GgufModel, linears: list[tuple[str, ...]]) -> StoredFormats | None:
    """Return the formats in which each layer's matrices `linears` and the head are loaded: those of their
    blocks; of matrices that are joined the common one, or floats if any of them is stored in floats. None if
    all of the layers are floats."""
    formats = []
    for layer, names in enumerate(linears):
        own: dict[str, GgufBlocks | None] = dict.fromkeys(names)
        for group in joined(names):
            infos = [model.tensors.get(layer_tensor(layer, f"{part_name(name)}.weight")) for name in group]
            kinds = [FORMATS.get(info.type.name) if info else None for info in infos]
            known = [kind for kind in kinds if kind]
            if len(known) == len(kinds):
                own |= dict.fromkeys(group, GgufBlocks(common_format(known)))
        formats.append(tuple(own.values()))
    if not any(any(own) for own in formats):
        return None
    info = model.tensors.get(HEAD) or model.tensors.get(EMBEDDING)
    head = FORMATS.get(info.type.name) if info else None
    return StoredFormats(tuple(formats), tuple(linears), GgufBlocks(head) if head else None)


def _dtype(model: GgufModel, stored: StoredFormats | None) -> str:
    """Return the data type of what is not in integers: that of the first layer's floats, or bfloat16."""
    info = model.tensors.get(layer_tensor(0, "attn_q.weight"))
    return "bfloat16" if stored or info is None else DTYPES.get(info.type.name, "bfloat16")


def _eos_token_ids(metadata: Metadata, vocab_size: int) -> tuple[int, ...]:
    """Return all ids that an entry names, and those of control tokens that end a text by their name."""
    ids = {
        metadata.integer(key, None, 0, vocab_size - 1)
        for key in (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        if key in metadata
    }
    if "tokenizer.ggml.tokens" in metadata and "tokenizer.ggml.token_type" in metadata:
        tokens = metadata.texts("tokenizer.ggml.tokens")
        types = metadata.numbers("tokenizer.ggml.token_type", len(tokens))
        ids |= {int(i) for i in np.flatnonzero(types == CONTROL) if tokens[i] in END_OF_TEXT}
    return tuple(sorted(ids))
