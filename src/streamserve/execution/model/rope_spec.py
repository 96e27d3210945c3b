"""Specifications of rotary position embeddings, read from `config.json`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from streamserve.execution.model.architectures import Architecture
from streamserve.execution.model.fields import Fields, shown

MAX_THETA = 1e15
"""Maximum base wavelength of rotary embeddings."""

MAX_POSITIONS = 1 << 24
"""Maximum number of positions: angles are computed in float32, which holds no larger integers exactly."""

MAX_FACTOR = 65536.0
"""Maximum factor that stretches rotary embeddings: from 256 positions to `MAX_POSITIONS`."""

QUERY_SCALING = "llama_4_scaling_beta"
"""The rope parameter that scales queries by position."""

UNSUPPORTED = ("alpha", "long_mscale", "mrope_section", "short_mscale")
"""Fields of rope parameters that change the result, and are not supported with any `rope_type`."""

ORIGINAL = "original_max_position_embeddings"

Scaling = Literal["default", "factors", "linear", "llama3", "longrope", "yarn"]

KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
KINDS_BY_LAYER = ("default", "linear", "yarn")
"""Supported values of `rope_type`: for one set of rope parameters, and for a set for each kind of layer."""


STRETCHED = ("llama3", "longrope", "yarn")
"""Values of `rope_type` with which transformers completes the original number of positions."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: base wavelength `theta`, and the `scaling` for long contexts.

    - "linear" uses `factor`.
    - "factors" divides the frequency of each pair of dimensions by one of `factors`.
    - "llama3" divides low frequencies by `factor`; the frequency factors bound the blended range, relative to
      `original_positions`.
    - "longrope" divides the frequency of each pair of dimensions by one of `factors`. If contexts may exceed
      `original_positions`, `long_factors` replace them (`at_length`).
    - "yarn" divides frequencies with fewer than `beta_slow` turns in `original_positions` by `factor`, keeps
      frequencies with more than `beta_fast` turns, and blends in between. `truncate` widens that range to
      whole dimensions.

    `amplitude` multiplies cosines and sines.
    """

    theta: float
    scaling: Scaling = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0

    def at_length(self, max_model_len: int) -> "RopeSpec":
        """Return the embedding for texts of up to `max_model_len` tokens. It is used at every position of
        every text, so that keys and values never depend on the final length of a text."""
        if not self.long_factors:
            return self
        longer = max_model_len > self.original_positions
        return replace(self, factors=self.long_factors if longer else self.factors, long_factors=())


@dataclass(frozen=True)
class QueryScaling:
    """A factor of queries that grows with their position p: 1 + beta · ln(1 + ⌊p / positions⌋)."""

    beta: float
    positions: int


def served_positions(positions: int, ropes: Sequence[RopeSpec | None]) -> int:
    """Return the number of positions of a model whose config has `positions`. With "yarn" it is `factor`
    times the original length, as in vLLM: model cards add this scaling to configs that have the unscaled
    length."""
    scaled = (int(rope.factor * rope.original_positions) for rope in ropes if rope and rope.scaling == "yarn")
    return next(scaled, positions)


def too_many_positions(factor: float, original: int) -> str:
    """Return why rope scaling by `factor` is refused for a model trained on `original` positions; empty if it
    is not."""
    if factor * original <= MAX_POSITIONS:
        return ""
    return f"{factor:g} times {original} positions are more than the {MAX_POSITIONS} that are supported"


LAYERS = ("full_attention", "sliding_attention")
"""The kinds of layers that may have separate rope parameters."""


def rope_parameters(config: Fields, by_layer: bool) -> tuple[Fields, Fields]:
    """Return the rope parameters of layers without a window, and of layers with one. They differ only if the
    architecture has them `by_layer`. Configs up to transformers 4 have rope_theta and rope_scaling; later
    ones have both in rope_parameters."""
    if by_layer:
        return _parameters_by_layer(config)
    scaling = config.nested("rope_scaling") or config.nested("rope_parameters") or Fields(config.name, {})
    if any(isinstance(value, dict) for value in scaling.values.values()):
        scaling.refuse("rope_parameters", "that differ between layers are not supported")
    return scaling, scaling


def _parameters_by_layer(config: Fields) -> tuple[Fields, Fields]:
    none = Fields(config.name, {})
    nested = config.nested("rope_parameters")
    scaling = config.nested("rope_scaling")
    if nested is None:
        return scaling or none, none
    if scaling is not None:
        config.refuse("rope_scaling", "is not supported in addition to rope_parameters")
    for name in nested.values:
        if name not in LAYERS:
            nested.refuse(name, f"is not supported: there must be {' and '.join(LAYERS)}")
    full, sliding = (nested.nested(name) or none for name in LAYERS)
    return full, sliding


def rotated_dimensions(config: Fields, parameters: Fields, head_dim: int, partial: float | None) -> int:
    """Return the number of a head's dimensions that are rotated. `partial`: the architecture's default of
    their share; None: all are."""
    holder = config if parameters.get("partial_rotary_factor") is None else parameters
    share = holder.number("partial_rotary_factor", partial or 1.0, maximum=1.0)
    if share != 1 and partial is None:
        holder.refuse("partial_rotary_factor", "other than 1 is not supported")
    rotated = int(head_dim * share)
    if rotated < 2 or rotated % 2:
        holder.refuse("partial_rotary_factor", f"must give an even number of dimensions, not {rotated}")
    return rotated


def read_ropes(
    config: Fields, family: Architecture, parameters: tuple[Fields, Fields], rotated: int
) -> tuple[RopeSpec, RopeSpec]:
    """Return the rotary embeddings, over `rotated` dimensions, of layers without a window and of layers with
    one. `parameters` has the rope parameters of both. Raises CheckpointError, which names the unsupported
    field."""
    theta = config.number("rope_theta", family.theta, 1.0, MAX_THETA)
    rope = _read_rope(config, parameters[0], family, theta, rotated)
    if family.local_theta is None:
        return rope, rope
    theta = config.number("rope_local_base_freq", family.local_theta, 1.0, MAX_THETA)
    return rope, _read_rope(config, parameters[1], family, theta, rotated)


def _read_rope(
    config: Fields, parameters: Fields, family: Architecture, theta: float, rotated: int
) -> RopeSpec:
    """Return the rotary embedding with `parameters`; `theta` is the base wavelength if these have none."""
    for name in UNSUPPORTED if family.scales_queries else (*UNSUPPORTED, QUERY_SCALING):
        if parameters.get(name) is not None:
            parameters.refuse(name, "is not supported")
    theta = parameters.number("rope_theta", theta, 1.0, MAX_THETA)
    kind = _kind(parameters, family)
    kinds = KINDS if family.local_theta is None else KINDS_BY_LAYER
    if kind not in kinds:
        supported = ", ".join(map(repr, kinds))
        parameters.refuse("rope_type", f"{shown(kind)} is not supported (supported: {supported})")
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", parameters.number("factor", None, 1.0, MAX_FACTOR))
    original = _original_positions(config, parameters, family)
    if kind == "dynamic":
        return _dynamic(config, parameters, theta, original)
    if kind == "llama3":
        return _llama3(parameters, theta, original)
    if family.local_theta is not None and not parameters.flag("truncate", True):
        parameters.refuse("truncate", "false is not supported where layers differ")
    if kind == "longrope":
        return _longrope(config, parameters, theta, original, rotated)
    return _yarn(parameters, theta, original)


def _kind(parameters: Fields, family: Architecture) -> object:
    """Return the value of `rope_type` in rope parameters, not validated."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    return "longrope" if kind in family.longrope_names else kind


def read_query_scaling(config: Fields, parameters: Fields, family: Architecture) -> QueryScaling | None:
    """Return the scaling of queries in rope parameters; None if there is none."""
    if not (family.scales_queries and parameters.get(QUERY_SCALING)):
        return None
    beta = parameters.number(QUERY_SCALING, None, 1e-6, 1e6)
    if _kind(parameters, family) in STRETCHED:
        return QueryScaling(beta, _original_positions(config, parameters, family))
    return QueryScaling(beta, parameters.integer(ORIGINAL, maximum=MAX_POSITIONS))


def _original_positions(config: Fields, parameters: Fields, family: Architecture) -> int:
    # As in transformers, the field at the top of the config has precedence over the nested one.
    if config.get(ORIGINAL) is not None:
        return config.integer(ORIGINAL, maximum=MAX_POSITIONS)
    default = family.original_positions or config.integer("max_position_embeddings", maximum=MAX_POSITIONS)
    nested = parameters.integer(ORIGINAL, default, MAX_POSITIONS)
    if family.original_positions not in (None, nested):
        parameters.refuse(ORIGINAL, f"of {nested} must be next to the rope parameters, not in them")
    return nested


def _dynamic(config: Fields, parameters: Fields, theta: float, original: int) -> RopeSpec:
    """Return the plain embedding. "dynamic" scaling changes the frequencies only in texts longer than
    max_position_embeddings, which are not served: there every token's keys would depend on the text's
    length."""
    parameters.number("factor", None, 1.0, MAX_FACTOR)
    positions = config.integer("max_position_embeddings", maximum=MAX_POSITIONS)
    if original < positions:
        parameters.refuse(
            "rope_type",
            f"'dynamic' is not supported with {ORIGINAL} {original} below max_position_embeddings "
            f"{positions}: the keys of a token would depend on the length of its text",
        )
    return RopeSpec(theta)


def _llama3(parameters: Fields, theta: float, original: int) -> RopeSpec:
    low, high = (parameters.number(f"{name}_freq_factor", None, 1e-6, 1e6) for name in ("low", "high"))
    if low >= high:
        parameters.refuse("high_freq_factor", f"must be above low_freq_factor {low:g}, not {high:g}")
    factor = parameters.number("factor", None, 1.0, MAX_FACTOR)
    return RopeSpec(theta, "llama3", factor, low, high, original)


def _longrope(config: Fields, parameters: Fields, theta: float, original: int, rotated: int) -> RopeSpec:
    ratio = max(1.0, config.integer("max_position_embeddings", maximum=MAX_POSITIONS) / original)
    factor = parameters.number("factor", ratio, 1.0, MAX_FACTOR)
    stretched = factor > 1 and original > 1
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if stretched else 1.0
    return RopeSpec(
        theta,
        "longrope",
        original_positions=original,
        factors=_factors(parameters, "short_factor", rotated // 2),
        long_factors=_factors(parameters, "long_factor", rotated // 2),
        amplitude=parameters.number("attention_factor", default, 1e-6, 1e6),
    )


def _yarn(parameters: Fields, theta: float, original: int) -> RopeSpec:
    if theta <= 1:
        parameters.refuse("rope_theta", f"must be above 1 with 'yarn', not {theta:g}")
    fast = parameters.number("beta_fast", 32.0, 1e-6, 1e6)
    slow = parameters.number("beta_slow", 1.0, 1e-6, 1e6)
    if slow >= fast:
        parameters.refuse("beta_fast", f"must be above beta_slow {slow:g}, not {fast:g}")
    factor = parameters.number("factor", None, 1.0, MAX_FACTOR)
    if reason := too_many_positions(factor, original):
        parameters.refuse("factor", reason)
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=parameters.flag("truncate", True),
        amplitude=parameters.number("attention_factor", _yarn_amplitude(parameters, factor), 1e-6, 1e6),
    )


def _yarn_amplitude(parameters: Fields, factor: float) -> float:
    """Return the default amplitude: 0.1 ln(factor) + 1. If the parameters have both `mscale` and
    `mscale_all_dim`, it is the ratio of the amplitudes with these weights of the logarithm."""

    def amplitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if not (parameters.get("mscale") and parameters.get("mscale_all_dim")):
        return amplitude(1.0)
    above, below = (parameters.number(name, None, 1e-6, 1e6) for name in ("mscale", "mscale_all_dim"))
    return amplitude(above) / amplitude(below)


def _factors(parameters: Fields, name: str, count: int) -> tuple[float, ...]:
    values = parameters.get(name)
    if not isinstance(values, list) or len(values) != count:
        parameters.refuse(name, f"must be a list of {count} numbers")
    return tuple(Fields(parameters.name, {name: value}).number(name, None, 1e-6, 1e6) for value in values)
