"""Read the spec of a model in GGUF files, from its metadata and the types of its tensors. A model that cannot
be computed exactly is refused by the entry's name, and so are entries that its architecture does not have."""

from dataclasses import replace

import numpy as np

from streamserve.execution.formats.gguf.blocks import FORMATS
from streamserve.execution.formats.gguf.families import (
    CHOSEN_GROUPS,
    DENSE,
    FAMILIES,
    GROUPS,
    PREDICTORS,
    SCALE,
    SHARED_COUNT,
)
from streamserve.execution.formats.gguf.names import EMBEDDING, HEAD, layer_tensor, part_name
from streamserve.execution.formats.gguf.ropes import YARN, read_layers, read_query_scaling
from streamserve.execution.formats.quantization import common_format
from streamserve.execution.formats.stored.formats import GgufBlocks, StoredFormats, joined
from streamserve.execution.model.architectures import ARCHITECTURES, Architecture
from streamserve.execution.model.end_of_text import within_vocabulary
from streamserve.execution.model.experts import MAX_ALL_EXPERTS, MAX_EXPERTS, Experts
from streamserve.execution.model.rope_spec import MAX_POSITIONS, served_positions
from streamserve.execution.model.spec import (
    MAX_LAYERS,
    MAX_MULTIPLIER,
    Clamp,
    ModelSpec,
    Multipliers,
    linear_names,
)
from streamserve.gguf.files import GgufModel
from streamserve.gguf.metadata import Metadata, shown
from streamserve.protocol.errors import CheckpointError

SOFTMAX, SIGMOID = 1, 2
"""GGUF's numbers for the function from experts' scores to weights."""

KNOWN = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "attention.sliding_window", "attention.causal",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_count", "expert_used_count",
    "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_weights_norm",
    "expert_gating_func", "tensor_data_layout", "pooling_type", *YARN,
}  # fmt: skip
"""Entries of any architecture that are supported, or have no effect."""

WITH_WINDOWS = {"LlamaForCausalLM": "MistralForCausalLM", "Olmo2ForCausalLM": "Olmo3ForCausalLM"}
"""Architectures with sliding windows whose files have the name of an architecture without windows, by that
name."""

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Constants of gpt-oss that GGUF does not record."""

BLOCK_VERSION = 2
"""The supported version of the blocks' layout; GGUF files never had another version."""

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

END_OF_TEXT = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>",
    "<|return|>", "<|call|>",
}  # fmt: skip
"""Control tokens that end a text in any model that has them. llama.cpp has the same list of names."""
END_OF_TURN, END_OF_ANSWER = "<|end|>", "<|return|>"
"""END_OF_TURN ends a text too, except in models with END_OF_ANSWER: there it ends a part of an answer."""
CONTROL = 3
"""GGUF's number for the type of control tokens."""


def read_spec(model: GgufModel) -> ModelSpec:
    """Return the spec of a model. Raises CheckpointError, which names the file and the entry or tensor."""
    metadata = model.metadata
    family = metadata.text("general.architecture")
    if family not in FAMILIES:
        metadata.refuse(
            "general.architecture", f"{family!r:.80} is not supported (supported: {', '.join(FAMILIES)})"
        )
    _check_kind(metadata)
    entry = f"{family}.".__add__
    _refuse_unknown(metadata, family)
    hidden = metadata.integer(entry("embedding_length"))
    heads = metadata.integer(entry("attention.head_count"))
    predictors = _predictors(metadata, family)
    layers = metadata.integer(entry("block_count"), maximum=MAX_LAYERS) - predictors
    kv_heads = metadata.integer(entry("attention.head_count_kv"), heads)
    if heads % kv_heads:
        metadata.refuse(entry("attention.head_count"), f"must be a multiple of {kv_heads} key-value heads")
    experts = _experts(model, family, layers)
    partial = ARCHITECTURES[FAMILIES[family].architecture].partial_rotary is not None
    head_dim, rotated = _dimensions(metadata, family, hidden, heads, partial)
    ropes, windows = read_layers(model, family, layers, rotated)
    name = _architecture(family, any(windows), experts is not None)
    own = ARCHITECTURES[name]
    vocab_size = _vocab_size(model, family)
    query_scalar = hidden // heads if layers == FAMILIES[family].wide_layers else head_dim
    linears = [linear_names(own.fused, experts, layer) for layer in range(layers)]
    stored = _stored_formats(model, linears)

    norm = layer_tensor(0, "attn_q_norm.weight")
    has_qk_norm = not FAMILIES[family].optional_qk_norm or norm in model.tensors

    def has_bias(linear: str) -> bool:
        return layer_tensor(0, f"{part_name(linear)}.bias") in model.tensors

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
        rotary_dim=rotated,
        ropes=ropes,
        windows=windows,
        max_position_embeddings=served_positions(
            metadata.integer(entry("context_length"), maximum=MAX_POSITIONS), ropes
        ),
        tied_embeddings=HEAD not in model.tensors,
        qkv_bias=has_bias(linears[0][0]),
        out_bias=has_bias("self_attn.o_proj"),
        mlp_bias=has_bias("mlp.gate_proj"),
        multipliers=_multipliers(metadata, family, own, query_scalar),
        dtype=_dtype(model, stored, part_name(linears[0][0])),
        eos_token_ids=_eos_token_ids(metadata, vocab_size),
        qk_norm=own.qk_norm if has_qk_norm else "none",
        norms=own.norms,
        wide_norms=own.wide_norms,
        activation=own.activation,
        rounds_embedding_multiplier=own.scaled_embedding,
        attention_cap=_cap(metadata, entry("attn_logit_softcapping"), own.attention_cap),
        logits_cap=_cap(metadata, entry("final_logit_softcapping"), own.logits_cap),
        fused=own.fused,
        stored=stored,
        experts=experts,
        clamp=Clamp(SWIGLU_ALPHA, SWIGLU_LIMIT) if own.clamped else None,
        sinks=own.sinks,
        query_scaling=read_query_scaling(metadata, family),
        predictors=predictors,
        multimodal=FAMILIES[family].multimodal,
    )


def _architecture(family: str, has_windows: bool, has_experts: bool) -> str:
    """Return the architecture's name in Hugging Face folders."""
    if family == "llama" and has_experts:
        return "MixtralForCausalLM"
    name = FAMILIES[family].architecture
    return WITH_WINDOWS.get(name, name) if has_windows else name


def _multipliers(metadata: Metadata, family: str, own: Architecture, query_scalar: int) -> Multipliers:
    """Return the multipliers of intermediate results. By default attention scores are multiplied by the
    inverse square root of `query_scalar`."""

    def number(name: str, default: float) -> float:
        return metadata.number(f"{family}.{name}", default, 1 / MAX_MULTIPLIER, MAX_MULTIPLIER)

    return Multipliers(
        attention=number("attention.scale", query_scalar**-0.5),
        embedding=metadata.integer(f"{family}.embedding_length") ** 0.5
        if own.scaled_embedding
        else number("embedding_scale", 1.0),
        residual=number("residual_scale", 1.0),
        logits=1 / number("logit_scale", 1.0),
    )


def _cap(metadata: Metadata, key: str, default: float | None) -> float:
    """Return a soft cap; 0: none."""
    return metadata.number(key, default or 0.0, 0.0, 1e6)


def _check_kind(metadata: Metadata) -> None:
    """Raise CheckpointError for files without a model, or with another layout of blocks."""
    kind = metadata.text("general.type", "model")
    if kind != "model":
        metadata.refuse("general.type", f"{shown(kind)} is not supported (supported: 'model')")
    version = metadata.integer("general.quantization_version", BLOCK_VERSION, minimum=0)
    if version != BLOCK_VERSION:
        metadata.refuse(
            "general.quantization_version", f"{version} is not supported (supported: {BLOCK_VERSION})"
        )


def _refuse_unknown(metadata: Metadata, family: str) -> None:
    """Raise CheckpointError for entries that are unknown or would change the result."""
    known = KNOWN | FAMILIES[family].entries
    for key in metadata.entries:
        if key.startswith(f"{family}.") and key.removeprefix(f"{family}.") not in known:
            metadata.refuse(key, "is not supported")
    if not metadata.flag(f"{family}.attention.causal", True):
        metadata.refuse(f"{family}.attention.causal", "false is not supported")
    if family == "granite" and not metadata.flag("granite.rope.scaling.finetuned", True):
        metadata.refuse("granite.rope.scaling.finetuned", "false is not supported: no layer is rotated")
    layout = metadata.text(f"{family}.tensor_data_layout", "reference")
    if layout not in ("reference", "Meta AI original pth"):
        metadata.refuse(f"{family}.tensor_data_layout", f"{shown(layout)} is not supported")


def _predictors(metadata: Metadata, family: str) -> int:
    """Return the number of blocks that predict further tokens."""
    if not FAMILIES[family].predictors:
        return 0
    blocks = metadata.integer(f"{family}.block_count", maximum=MAX_LAYERS)
    return metadata.integer(f"{family}.{PREDICTORS}", 0, minimum=0, maximum=blocks - 1)


def _experts(model: GgufModel, family: str, layers: int) -> Experts | None:
    """Return the mixture of experts, which every layer after the first dense ones has; None if the model has
    none."""
    metadata, entry = model.metadata, f"{family}.".__add__
    count = metadata.integer(entry("expert_count"), 0, minimum=0, maximum=MAX_EXPERTS)
    own = ARCHITECTURES[FAMILIES[family].architecture].mixture
    if count == 0:
        if own:
            metadata.refuse(entry("expert_count"), "is missing")
        return None
    normalized = FAMILIES[family].normalized
    if normalized is None:
        metadata.refuse(entry("expert_count"), "is not supported: this architecture has no experts")
    if count * layers > MAX_ALL_EXPERTS:
        metadata.refuse(
            entry("expert_count"),
            f"{count} in {layers} layers: at most {MAX_ALL_EXPERTS} in all are supported",
        )
    sigmoid = own is not None and own.sigmoid
    function, name = (SIGMOID, "sigmoid") if sigmoid else (SOFTMAX, "softmax")
    if metadata.integer(entry("expert_gating_func"), function) != function:
        metadata.refuse(entry("expert_gating_func"), f"is not supported (supported: {function}, {name})")
    dense = metadata.integer(entry(DENSE), 0, minimum=0, maximum=layers - 1)
    experts = Experts(
        layers=tuple(range(dense, layers)),
        count=count,
        chosen=metadata.integer(entry("expert_used_count"), maximum=count),
        intermediate_size=_outputs(model, dense, "ffn_gate_exps", 1, entry("expert_feed_forward_length")),
        normalized=metadata.flag(entry("expert_weights_norm"), normalized),
        shared_size=_outputs(model, dense, "ffn_gate_shexp", 0, entry("expert_shared_feed_forward_length"))
        if own and own.shared != "none"
        else 0,
        shared_gated=own is not None and own.shared == "gated",
        biased=own is not None and own.biased,
        tensors=FAMILIES[family].expert_tensors,
    )
    return _with_sigmoids(metadata, entry(""), experts) if sigmoid else experts


def _with_sigmoids(metadata: Metadata, prefix: str, experts: Experts) -> Experts:
    """Return experts whose scores are sigmoids, with the file's groups and scale (0 means 1, as in
    llama.cpp)."""
    key, size = prefix + SHARED_COUNT, experts.intermediate_size
    if key in metadata and metadata.integer(key, minimum=0) * size != experts.shared_size:
        metadata.refuse(key, f"contradicts the shared expert's {experts.shared_size} inner features")
    groups = metadata.integer(prefix + GROUPS, 1, minimum=0, maximum=max(1, experts.count // 2)) or 1
    if experts.count % groups:
        metadata.refuse(prefix + GROUPS, f"{groups} does not divide {experts.count} experts")
    least = -(-experts.chosen * groups // experts.count)
    chosen_groups = metadata.integer(prefix + CHOSEN_GROUPS, groups, minimum=least, maximum=groups)
    scale = metadata.number(prefix + SCALE, 1.0, 0.0, 1e6) or 1.0
    return replace(experts, sigmoid=True, groups=groups, chosen_groups=chosen_groups, scale=scale)


def _outputs(model: GgufModel, layer: int, name: str, dimension: int, key: str) -> int:
    """Return the number of outputs of a layer's matrix `name`: its size along `dimension`. Raises
    CheckpointError if the entry `key` contradicts it."""
    tensor = layer_tensor(layer, f"{name}.weight")
    info = model.tensors.get(tensor)
    if info is None or len(info.shape) != dimension + 2:
        raise CheckpointError(f"{model.path}: {tensor} is missing, or not one tensor")
    size = info.shape[dimension]
    if model.metadata.integer(key, size) != size:
        model.metadata.refuse(key, f"contradicts the {size} outputs of {tensor}")
    return size


def _dimensions(metadata: Metadata, family: str, hidden: int, heads: int, partial: bool) -> tuple[int, int]:
    """Return the number of a head's dimensions, and the number of rotated ones: all, unless `partial`."""
    key, rotated_key = f"{family}.attention.key_length", f"{family}.rope.dimension_count"
    if key not in metadata and hidden % heads:
        metadata.refuse(f"{family}.embedding_length", f"{hidden} is not a multiple of {heads} heads")
    head_dim = metadata.integer(key, max(1, hidden // heads))
    if head_dim % 2:
        metadata.refuse(key, f"must be even for rotary embeddings, not {head_dim}")
    rotated = metadata.integer(rotated_key, head_dim)
    if partial and (rotated % 2 or rotated > head_dim):
        metadata.refuse(rotated_key, f"must be even and at most {head_dim}, not {rotated}")
    for name in ("attention.value_length", *(() if partial else ("rope.dimension_count",))):
        if metadata.integer(f"{family}.{name}", head_dim) != head_dim:
            metadata.refuse(
                f"{family}.{name}", f"other than {head_dim}, the head size of keys, is not supported"
            )
    return head_dim, rotated


def _vocab_size(model: GgufModel, family: str) -> int:
    """Return the number of the embedding's rows. The tokenizer's tokens are the first rows; others are
    padding."""
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
    """Return the formats that the head and each layer's matrices `linears` are loaded in; None if all layers
    are in floats. A matrix is loaded in the format of its blocks. Joined matrices are loaded in their common
    format, or in floats if any of them is stored in floats."""
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


def _dtype(model: GgufModel, stored: StoredFormats | None, first: str) -> str:
    """Return the data type of tensors that are not in integers: bfloat16 in quantized models, otherwise the
    type of the `first` matrix of a layer."""
    info = model.tensors.get(layer_tensor(0, f"{first}.weight"))
    return "bfloat16" if stored or info is None else DTYPES.get(info.type.name, "bfloat16")


def _eos_token_ids(metadata: Metadata, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of tokens that end a text: all ids that an entry names, and the ids of control tokens
    with known names. An id outside of the vocabulary is left out with a warning."""
    named = [
        (f"{metadata.path}: {key}", metadata.integer(key, None, -(2**31), 2**32 - 1))
        for key in (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        if key in metadata
    ]
    ids = set(within_vocabulary(named, vocab_size))
    if "tokenizer.ggml.tokens" in metadata and "tokenizer.ggml.token_type" in metadata:
        tokens = metadata.texts("tokenizer.ggml.tokens")
        types = metadata.numbers("tokenizer.ggml.token_type", len(tokens))
        control = {tokens[i]: int(i) for i in np.flatnonzero(types == CONTROL)}
        ends = END_OF_TEXT if END_OF_ANSWER in control else END_OF_TEXT | {END_OF_TURN}
        ids |= {control[text] for text in ends & control.keys()}
    return tuple(sorted(ids))
