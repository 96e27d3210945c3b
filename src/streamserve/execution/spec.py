"""Model specifications, read from the `config.json` of a Hugging Face folder: sizes, and as data the few
points in which Llama, Mistral, Qwen2 and Qwen3 differ. A model that cannot be computed exactly is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from streamserve.execution.fields import Fields, read_fields
from streamserve.execution.stored.config import read_stored_formats
from streamserve.execution.stored.formats import StoredFormats

MAX_LAYERS = 10_000
"""More than any model has; the count is compared with the tensors of the files afterwards."""

MAX_THETA = 1e15
"""The longest base wavelength of rotary embeddings, and the largest factor that stretches them."""

Windows = Literal["none", "every layer", "some layers"]


@dataclass(frozen=True)
class Architecture:
    """How one family differs from the others. None for a bias: the config's `attention_bias` decides.

    `kv_heads`, `head_dim` and `window` are the family's values where a config leaves the field out (None:
    as many as heads, hidden_size / heads, no window).
    """

    qkv_bias: bool | None
    out_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    windows: Windows
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(None, None, None, qk_norm=False, windows="none"),
    "MistralForCausalLM": Architecture(
        False, False, False, qk_norm=False, windows="every layer", kv_heads=8, window=4096
    ),
    "Qwen2ForCausalLM": Architecture(
        True, False, False, qk_norm=False, windows="some layers", kv_heads=32, window=4096
    ),
    "Qwen3ForCausalLM": Architecture(
        None, None, False, qk_norm=True, windows="some layers", kv_heads=32, head_dim=128, window=4096
    ),
}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: base wavelength `theta`, and the scaling for long contexts. "linear"
    uses `factor` alone, "llama3" all parameters (with the wavelengths it keeps relative to
    `original_positions`)."""

    theta: float
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """Everything the forward pass depends on, apart from the weights. `windows[layer]` is the number of
    latest tokens that a token sees in that layer, itself included (None: all). `dtype` is the weights' dtype
    according to the config, if given. `eos_token_ids` end a text. `stored` is how the layers' matrices are
    stored if any is quantized already."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    max_position_embeddings: int
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    stored: StoredFormats | None = None


def read_spec(folder: Path) -> ModelSpec:
    """Return the spec of the model in `folder`. Raises CheckpointError naming the file and the unsupported
    field."""
    config = read_fields(folder / "config.json")
    name = _architecture_name(config)
    family = ARCHITECTURES[name]
    _refuse_unsupported(config)
    heads = config.integer("num_attention_heads")
    layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    vocab_size = config.integer("vocab_size")
    attention_bias = config.flag("attention_bias", False)
    tied = config.flag("tie_word_embeddings", False)
    spec = ModelSpec(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", family.kv_heads or heads),
        head_dim=_head_dim(config, family),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6, maximum=1.0),
        rope=_rope(config),
        windows=_windows(config, family.windows, family.window, layers),
        max_position_embeddings=config.integer("max_position_embeddings"),
        tied_embeddings=tied,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias if family.out_bias is None else family.out_bias,
        mlp_bias=config.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        dtype=_dtype(config),
        eos_token_ids=_eos_token_ids(folder, config, vocab_size),
        stored=read_stored_formats(config, layers, tied),
    )
    if spec.num_heads % spec.num_kv_heads:
        config.refuse("num_attention_heads", f"must be a multiple of {spec.num_kv_heads} key-value heads")
    return spec


def _architecture_name(config: Fields) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        config.refuse("architectures", f"must name one architecture, not {names!r}")
    name = str(names[0])
    if name not in ARCHITECTURES:
        config.refuse("architectures", f"{name!r} is not supported (supported: {', '.join(ARCHITECTURES)})")
    return name


def _refuse_unsupported(config: Fields) -> None:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        config.refuse("hidden_act", f"{config.get('hidden_act')!r} is not supported (supported: 'silu')")
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        config.refuse("partial_rotary_factor", "other than 1 is not supported")


def _head_dim(config: Fields, family: Architecture) -> int:
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    if config.get("head_dim") is None and family.head_dim is None and hidden % heads:
        config.refuse("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = config.integer("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        config.refuse("head_dim", f"must be even for rotary embeddings, not {head_dim}")
    return head_dim


def _rope(config: Fields) -> RopeSpec:
    # Configs up to transformers 4 have rope_theta and rope_scaling, later ones rope_parameters with both.
    scaling = config.nested("rope_scaling") or config.nested("rope_parameters") or Fields(config.name, {})
    if any(isinstance(value, dict) for value in scaling.values.values()):
        scaling.refuse("rope_parameters", "that differ between layers are not supported")
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        scaling.refuse("partial_rotary_factor", "other than 1 is not supported")
    base = config.number("rope_theta", 10_000.0, 1.0, MAX_THETA)
    theta = scaling.number("rope_theta", base, 1.0, MAX_THETA)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", scaling.number("factor", None, 1.0, MAX_THETA))
    if kind != "llama3":
        scaling.refuse("rope_type", f"{kind!r} is not supported (supported: 'default', 'linear', 'llama3')")
    original = "original_max_position_embeddings"  # at the top it outranks the nested one, as in transformers
    holder = scaling if config.get(original) is None else config
    low, high = (scaling.number(f"{name}_freq_factor", None, 1e-6, 1e6) for name in ("low", "high"))
    if low >= high:
        scaling.refuse("high_freq_factor", f"must be above low_freq_factor {low:g}, not {high:g}")
    return RopeSpec(
        theta,
        "llama3",
        scaling.number("factor", None, 1.0, MAX_THETA),
        low,
        high,
        holder.integer(original, config.integer("max_position_embeddings")),
    )


def _windows(config: Fields, rule: Windows, default: int | None, layers: int) -> tuple[int | None, ...]:
    on = rule == "every layer" or (rule == "some layers" and config.flag("use_sliding_window", False))
    size = config.get("sliding_window", default) if on else None
    window = None if size is None else config.integer("sliding_window", size)
    full = config.get("max_window_layers", 28) if rule == "some layers" else 0
    if isinstance(full, bool) or not isinstance(full, int):
        config.refuse("max_window_layers", f"must be an integer, not {full!r}")
    windows = tuple(window if layer >= full else None for layer in range(layers))
    types = config.get("layer_types")
    if types is None:
        return windows
    if not isinstance(types, list) or len(types) != layers:
        config.refuse("layer_types", f"must be a list with one entry for each of {layers} layers")
    for layer_type in types:
        if layer_type not in ("full_attention", "sliding_attention"):
            config.refuse("layer_types", f"{layer_type!r} is not supported")
    listed = tuple(window if layer_type == "sliding_attention" else None for layer_type in types)
    if (window is None and "sliding_attention" in types) or (rule != "some layers" and listed != windows):
        config.refuse("layer_types", "contradicts the architecture's sliding windows")
    return listed


def _dtype(config: Fields) -> str | None:
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        config.refuse("dtype", f"{name!r} is not supported (supported: float32, bfloat16, float16)")
    return name


def _eos_token_ids(folder: Path, config: Fields, vocab_size: int) -> tuple[int, ...]:
    """Return all ids that either file names: chat models often list their end-of-turn token in only one of
    them."""
    sources = [config]
    if (folder / "generation_config.json").exists():
        sources.append(read_fields(folder / "generation_config.json"))
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                source.refuse("eos_token_id", f"{token!r} is not among the {vocab_size} tokens")
            ids.add(token)
    return tuple(sorted(ids))
