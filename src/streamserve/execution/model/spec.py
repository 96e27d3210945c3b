"""Model specifications, read from the `config.json` of a Hugging Face folder: sizes, and the differences of
architectures as data. A model that cannot be computed exactly is refused."""

from dataclasses import dataclass, replace
from pathlib import Path

from streamserve.execution.formats.stored.config import read_stored_formats
from streamserve.execution.formats.stored.formats import (
    FUSED_LINEARS,
    LINEARS,
    StoredFormats,
    is_attention,
)
from streamserve.execution.model.architectures import (
    ARCHITECTURES,
    Activation,
    Architecture,
    Norms,
    QKNorm,
    Windows,
)
from streamserve.execution.model.end_of_text import end_of_text_ids
from streamserve.execution.model.experts import Experts, read_experts
from streamserve.execution.model.fields import Fields, read_fields, shown
from streamserve.execution.model.rope_spec import (
    MAX_POSITIONS,
    QueryScaling,
    RopeSpec,
    read_query_scaling,
    read_ropes,
    rope_parameters,
    rotated_dimensions,
    served_positions,
)
from streamserve.execution.model.text_part import TEXT_PARTS, text_family, text_fields

MAX_LAYERS = 10_000
"""Maximum number of layers: more than any model has. Later the number is compared with the files' tensors."""

MAX_MULTIPLIER = 1e6
"""Maximum multiplier of embeddings, residuals, scores or logits, and the inverse of the minimum."""

PERIODS: dict[Windows, int | None] = {"every second": 2, "all but fourth": 4, "pattern": None}
"""Periods of the rules by which all but the last layer of each period have a window; None: the config has the
period."""


@dataclass(frozen=True)
class Multipliers:
    """Multipliers of intermediate results: of `attention` scores before the softmax, of `embedding` rows, of
    the additions of attention and MLP to the hidden states (`residual`), and of `logits`."""

    attention: float
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True)
class Clamp:
    """Bounds of an MLP's gates and values. The result is act(min(gate, limit)) · (1 + value), where the value
    is clamped to ±limit and act(x) = x · sigmoid(alpha · x)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ModelSpec:
    """Everything that the forward pass depends on, except the weights. For fields that are not listed see
    architectures.Architecture.

    * `ropes[layer]`: the layer's rotary embedding of the first `rotary_dim` dimensions of each head; None:
      none.
    * `windows[layer]`: the number of latest tokens that a token sees in the layer, itself included; None:
      all.
    * `dtype`: the weights' dtype in the config; None if it has none.
    * `eos_token_ids`: the tokens that end a text.
    * `rounds_embedding_multiplier`: the embedding multiplier is rounded to the data type.
    * `attention_cap`, `logits_cap`: bounds of scores and logits x, as cap · tanh(x / cap); 0: none.
    * `stored`: the formats of the layers' matrices, if any of them is stored quantized.
    * `experts`: the mixture of experts that is the MLP of some layers.
    * `predictors`: the number of further layers, which predict more tokens and are not loaded.
    * `query_scaling`: the queries' factor by position; None: 1.
    * `multimodal`: it is the text part of a multimodal checkpoint.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rotary_dim: int
    ropes: tuple[RopeSpec | None, ...]
    windows: tuple[int | None, ...]
    max_position_embeddings: int
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    multipliers: Multipliers
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    qk_norm: QKNorm = "none"
    norms: Norms = "before"
    norm_offset: float = 0.0
    wide_norms: bool = False
    activation: Activation = "silu"
    rounds_embedding_multiplier: bool = False
    attention_cap: float = 0.0
    logits_cap: float = 0.0
    fused: bool = False
    stored: StoredFormats | None = None
    experts: Experts | None = None
    clamp: Clamp | None = None
    sinks: bool = False
    query_scaling: QueryScaling | None = None
    predictors: int = 0
    multimodal: bool = False

    def experts_of(self, layer: int) -> Experts | None:
        """Return the mixture of experts of a layer; None if the layer has a plain MLP."""
        return self.experts if self.experts and self.experts.has(layer) else None

    def first_layers(self, layers: int) -> "ModelSpec":
        """Return the spec of the model that consists of the first `layers` layers."""
        return replace(self, num_layers=layers, ropes=self.ropes[:layers], windows=self.windows[:layers])

    def at_length(self, max_model_len: int) -> "ModelSpec":
        """Return the spec for texts of up to `max_model_len` tokens (RopeSpec.at_length)."""
        return replace(self, ropes=tuple(rope and rope.at_length(max_model_len) for rope in self.ropes))


def read_spec(folder: Path, embeds: bool = False) -> ModelSpec:
    """Return the spec of the model in `folder`. A model that only `embeds` may be a base model without an
    output head. Raises CheckpointError, which names the file and the unsupported field."""
    config = read_fields(folder / "config.json")
    name = _architecture_name(config, embeds)
    part = TEXT_PARTS.get(name)
    if part is None:
        family = ARCHITECTURES[name]
    else:
        config, name = text_fields(config, part)
        family = text_family(config, part, name)
    _refuse_unsupported(config, family)
    parameters = rope_parameters(config, by_layer=family.local_theta is not None)
    heads = config.integer("num_attention_heads")
    layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    vocab_size = config.integer("vocab_size")
    attention_bias = config.flag("attention_bias", family.attention_bias)
    tied = config.flag("tie_word_embeddings", family.tied)
    head_dim = _head_dim(config, family)
    rotated = rotated_dimensions(config, parameters[0], head_dim, family.partial_rotary)
    rope, local_rope = read_ropes(config, family, parameters, rotated)
    rotates = _rotates(config, layers) if family.skips_rotary else (True,) * layers
    experts = read_experts(config, family.mixture, layers)
    windows = _windows(config, family.windows, family.window, rotates)
    ropes = tuple(
        (local_rope if window else rope) if rotated else None
        for rotated, window in zip(rotates, windows, strict=True)
    )
    spec = ModelSpec(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", family.kv_heads or heads),
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", family.epsilon, maximum=1.0),
        rotary_dim=rotated,
        ropes=ropes,
        windows=windows,
        max_position_embeddings=served_positions(
            config.integer("max_position_embeddings", maximum=MAX_POSITIONS), ropes
        ),
        tied_embeddings=tied,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias if family.out_bias is None else family.out_bias,
        mlp_bias=config.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        multipliers=_multipliers(config, family, head_dim),
        dtype=_dtype(config),
        eos_token_ids=end_of_text_ids(folder, config, family.eos_token_id, vocab_size),
        qk_norm=_qk_norm(config, family),
        norms=family.norms,
        norm_offset=family.norm_offset,
        wide_norms=family.wide_norms,
        activation=family.activation,
        rounds_embedding_multiplier=family.scaled_embedding,
        attention_cap=_cap(config, "attn_logit_softcapping", family.attention_cap),
        logits_cap=_cap(config, "final_logit_softcapping", family.logits_cap),
        fused=family.fused,
        stored=read_stored_formats(
            config, tied, [linear_names(family.fused, experts, layer) for layer in range(layers)]
        ),
        experts=experts,
        clamp=_clamp(config) if family.clamped else None,
        sinks=family.sinks,
        query_scaling=read_query_scaling(config, parameters[0], family),
        predictors=_predictors(config) if family.predictors else 0,
        multimodal=part is not None,
    )
    if spec.num_heads % spec.num_kv_heads:
        config.refuse("num_attention_heads", f"must be a multiple of {spec.num_kv_heads} key-value heads")
    return spec


def linear_names(fused: bool, experts: Experts | None, layer: int) -> tuple[str, ...]:
    """Return the names of a layer's matrices within the layer: attention's, and its MLP's or experts'."""
    names = FUSED_LINEARS if fused else LINEARS
    if experts is None or not experts.has(layer):
        return names
    return (*filter(is_attention, names), *experts.matrices(hidden=1))


def _architecture_name(config: Fields, embeds: bool) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        config.refuse("architectures", f"must name one architecture, not {names!r}")
    name = str(names[0])
    if embeds and name.endswith("Model"):
        name = name.removesuffix("Model") + "ForCausalLM"
    if name not in ARCHITECTURES and name not in TEXT_PARTS:
        text = name.replace("ForConditionalGeneration", "ForCausalLM")
        every = ", ".join((*ARCHITECTURES, *TEXT_PARTS))
        hint = f"only the text model, {text}" if text in ARCHITECTURES else every
        config.refuse("architectures", f"{name!r} is not supported (supported: {hint})")
    return name


def _refuse_unsupported(config: Fields, family: Architecture) -> None:
    field, supported = family.activation_field, family.activation
    activation = config.get(field, supported)
    if activation != supported and (activation, supported) != ("swish", "silu"):
        config.refuse(field, f"{shown(activation)} is not supported (supported: {supported!r})")
    if config.get("use_bidirectional_attention"):
        config.refuse("use_bidirectional_attention", "is not supported")
    if config.get("clip_qkv") is not None:
        config.refuse("clip_qkv", "is not supported")
    if family.needs_rope and not (config.get("rope_scaling") or config.get("rope_parameters")):
        config.refuse("rope_scaling", "is missing")


def _head_dim(config: Fields, family: Architecture) -> int:
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    if config.get("head_dim") is None and family.head_dim is None and hidden % heads:
        config.refuse("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = config.integer("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        config.refuse("head_dim", f"must be even for rotary embeddings, not {head_dim}")
    return head_dim


def _qk_norm(config: Fields, family: Architecture) -> QKNorm:
    has = not family.optional_qk_norm or config.flag("use_qk_norm", False)
    return family.qk_norm if has else "none"


def _predictors(config: Fields) -> int:
    count = config.get("num_nextn_predict_layers", 1)
    if type(count) is not int or not 0 <= count <= MAX_LAYERS:
        config.refuse("num_nextn_predict_layers", f"must be a number of layers, not {shown(count)}")
    return count


def _multipliers(config: Fields, family: Architecture, head_dim: int) -> Multipliers:
    if not family.multipliers:
        scalar = head_dim
        if family.query_scalar is not None:
            scalar = config.integer("query_pre_attn_scalar", family.query_scalar)
        embedding = config.integer("hidden_size") ** 0.5 if family.scaled_embedding else 1.0
        return Multipliers(scalar**-0.5, embedding)

    def number(name: str) -> float:
        return config.number(name, 1.0, 1 / MAX_MULTIPLIER, MAX_MULTIPLIER)

    return Multipliers(
        attention=number("attention_multiplier"),
        embedding=number("embedding_multiplier"),
        residual=number("residual_multiplier"),
        logits=1 / number("logits_scaling"),
    )


def _clamp(config: Fields) -> Clamp:
    alpha = config.number("swiglu_alpha", 1.702, 1e-3, 1e3)
    return Clamp(alpha, config.number("swiglu_limit", 7.0, 1e-3, 1e6))


def _cap(config: Fields, name: str, default: float | None) -> float:
    """Return a soft cap; 0: none. If the field is absent, `default` is used; null means none. If `default` is
    None, the architecture does not support the field."""
    value = config.get(name, default)
    if value is None:
        return 0.0
    if default is None:
        config.refuse(name, "is not supported")
    return config.number(name, None, 1e-3, 1e6) if name in config.values else default


def _rotates(config: Fields, layers: int) -> tuple[bool, ...]:
    """Return, for each layer, whether it has a rotary embedding. The config lists 0 or 1 for each layer, or
    the last layer of every `no_rope_layer_interval` (default 4) has none."""
    listed = config.get("no_rope_layers")
    if listed is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(listed, list) or len(listed) < layers or any(value not in (0, 1) for value in listed):
        config.refuse("no_rope_layers", f"must be a list of 0 or 1 for each of {layers} layers")
    return tuple(value == 1 for value in listed[:layers])


def _windows(
    config: Fields, rule: Windows, default: int | None, rotates: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None if it has none. `rotates`: whether each layer has a
    rotary embedding."""
    optional = rule in ("some layers", "unrotated layers", "every layer if used", "some of every second")
    on = rule != "none" and (not optional or config.flag("use_sliding_window", False))
    size = config.get("sliding_window", default) if on else None
    if rule in PERIODS and size is None:
        config.refuse("sliding_window", "is missing")
    window = None if size is None else config.integer("sliding_window", size)
    slides = _slides(config, rule, rotates)
    windows = tuple(window if slide else None for slide in slides)
    types = _layer_types(config, len(rotates))
    if types is None:
        return windows
    by_type = tuple(window if kind == "sliding_attention" else None for kind in types)
    listed = rule not in ("none", "every layer")  # layer_types decides
    if (window is None and "sliding_attention" in types) or (not listed and by_type != windows):
        config.refuse("layer_types", "contradicts the architecture's sliding windows")
    return by_type


def _slides(config: Fields, rule: Windows, rotates: tuple[bool, ...]) -> list[bool]:
    """Return, for each layer, whether it has a window by `rule`."""
    layers = range(len(rotates))
    if rule == "unrotated layers":
        return [not rotated for rotated in rotates]
    if rule in PERIODS:
        period = PERIODS[rule] or config.integer("sliding_window_pattern", 6)
        return [(layer + 1) % period != 0 for layer in layers]
    full = config.get("max_window_layers", 28) if rule in ("some layers", "some of every second") else 0
    if isinstance(full, bool) or not isinstance(full, int):
        config.refuse("max_window_layers", f"must be an integer, not {shown(full)}")
    if rule == "some of every second":
        return [layer < full and layer % 2 == 0 for layer in layers]
    return [layer >= full for layer in layers]


def _layer_types(config: Fields, layers: int) -> list[str] | None:
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers:
        config.refuse("layer_types", f"must be a list with one entry for each of {layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            config.refuse("layer_types", f"{shown(kind)} is not supported")
    return types


def _dtype(config: Fields) -> str | None:
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        config.refuse("dtype", f"{name!r} is not supported (supported: float32, bfloat16, float16)")
    return name
