"""The rotary embeddings and sliding windows of the layers of a model in GGUF files."""

import math
from dataclasses import replace

import numpy as np

from streamserve.execution.formats.gguf.families import (
    FAMILIES,
    LOCAL_BASE,
    PATTERN,
    SECTIONS,
    TEMPERATURE,
    WINDOW,
    YARN_LOGARITHM,
    Family,
)
from streamserve.execution.formats.gguf.names import ROPE_FREQUENCIES, ROPE_LONG, ROPE_SHORT
from streamserve.execution.model.rope_spec import (
    MAX_FACTOR,
    MAX_POSITIONS,
    MAX_THETA,
    QueryScaling,
    RopeSpec,
    too_many_positions,
)
from streamserve.gguf.files import GgufModel
from streamserve.gguf.metadata import Metadata, shown

BASE, TYPE, FACTOR, ORIGINAL = (
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
)  # fmt: skip
AMPLITUDE = "rope.scaling.attn_factor"
FAST, SLOW, EXTRAPOLATION, YARN_AMPLITUDE = (
    f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow", "ext_factor", "attn_factor")
)
YARN = (FAST, SLOW, EXTRAPOLATION, YARN_AMPLITUDE)

Layers = tuple[tuple[RopeSpec | None, ...], tuple[int | None, ...]]
"""Rotary embeddings and sliding windows of all layers, as in ModelSpec."""


def read_layers(model: GgufModel, name: str, layers: int, rotated: int) -> Layers:
    """Return the rotary embedding, over `rotated` dimensions, and the sliding window of each layer. `name` is
    the architecture's name in the file."""
    family = FAMILIES[name]
    _check_sections(model.metadata, name)
    rope = _rope(model, name, family, rotated)
    local = _local_rope(model.metadata, name, family, rope)
    windows = _windows(model.metadata, name, family, layers)
    unrotated = [family.unrotated > 0 and (layer + 1) % family.unrotated == 0 for layer in range(layers)]
    ropes = [local if window else rope for window in windows]
    return tuple(None if skips else rope for skips, rope in zip(unrotated, ropes, strict=True)), windows


def _check_sections(metadata: Metadata, name: str) -> None:
    """Raise CheckpointError if pairs of dimensions are rotated by something else than time, height or width.
    These three positions of a token are equal in a text, so that the embedding is the plain one."""
    sections = metadata.entries.get(f"{name}.{SECTIONS}")
    if sections is None:
        return
    if not isinstance(sections, np.ndarray) or len(sections) not in (3, 4) or sections[3:].any():
        metadata.refuse(
            f"{name}.{SECTIONS}", f"must have sections of time, height and width, not {shown(sections)}"
        )


def read_query_scaling(metadata: Metadata, name: str) -> QueryScaling | None:
    """Return the scaling of queries by position; None if there is none."""
    beta = metadata.number(f"{name}.{TEMPERATURE}", 0.0, 0.0, 1e6)
    positions = metadata.integer(f"{name}.{ORIGINAL}", maximum=MAX_POSITIONS) if beta else 0
    return QueryScaling(beta, positions) if beta else None


def _windows(metadata: Metadata, name: str, family: Family, layers: int) -> tuple[int | None, ...]:
    key = f"{name}.{WINDOW}"
    window = metadata.integer(key, family.window, minimum=0)
    if window == 0:
        return (None,) * layers
    if family.period is None:
        metadata.refuse(key, "is not supported: the file does not say which layers use it")
    return tuple(window if slides else None for slides in _slides(metadata, name, family.period, layers))


def _slides(metadata: Metadata, name: str, period: int, layers: int) -> list[bool]:
    """Return, for each layer, whether it has a window. The file lists the layers, or all layers except the
    last of every `period` have one."""
    key = f"{name}.{PATTERN}"
    if isinstance(metadata.entries.get(key), np.ndarray):
        return [bool(value) for value in metadata.numbers(key, layers)]
    period = metadata.integer(key, period, minimum=0)
    return [period == 0 or (layer + 1) % period != 0 for layer in range(layers)]


def _local_rope(metadata: Metadata, name: str, family: Family, rope: RopeSpec) -> RopeSpec:
    """Return the rotary embedding of layers with a window."""
    default = family.local_theta or rope.theta
    theta = metadata.number(f"{name}.{LOCAL_BASE}", default, 1.0, MAX_THETA)
    return RopeSpec(theta) if family.plain_local else replace(rope, theta=theta)


def _rope(model: GgufModel, name: str, family: Family, rotated: int) -> RopeSpec:
    metadata, entry = model.metadata, f"{name}.".__add__
    theta = metadata.number(entry(BASE), 10_000.0, 1.0, MAX_THETA)
    has_longrope = AMPLITUDE in family.entries and ROPE_LONG in model.tensors
    kind = metadata.text(entry(TYPE), "longrope" if has_longrope else "none")
    if kind not in ("none", "linear", "yarn") and not (has_longrope and kind == "longrope"):
        metadata.refuse(entry(TYPE), f"{shown(kind)} is not supported (supported: 'none', 'linear', 'yarn')")
    for unused in YARN:
        if kind != "yarn" and entry(unused) in metadata:
            metadata.refuse(entry(unused), f"is not supported with scaling {kind!r}")
    if ROPE_FREQUENCIES in model.tensors:
        if kind != "none" or not family.permuted:
            metadata.refuse(ROPE_FREQUENCIES, f"is not supported for {name} with scaling {kind!r}")
        return RopeSpec(theta, "factors", factors=_factors(model, ROPE_FREQUENCIES, rotated // 2))
    if kind == "longrope":
        return _longrope(model, entry(""), theta, rotated // 2)
    for tensor in (ROPE_SHORT, ROPE_LONG):
        if tensor in model.tensors:
            metadata.refuse(tensor, f"is not supported for {name} with scaling {kind!r}")
    if kind == "linear":
        return RopeSpec(theta, "linear", metadata.number(entry(FACTOR), None, 1.0, MAX_FACTOR))
    if kind == "yarn":
        return _yarn(metadata, entry(""), theta, family.whole_yarn)
    return RopeSpec(theta)


def _longrope(model: GgufModel, prefix: str, theta: float, count: int) -> RopeSpec:
    metadata = model.metadata
    return RopeSpec(
        theta,
        "longrope",
        original_positions=metadata.integer(prefix + ORIGINAL, maximum=MAX_POSITIONS),
        factors=_factors(model, ROPE_SHORT, count),
        long_factors=_factors(model, ROPE_LONG, count),
        amplitude=metadata.number(prefix + AMPLITUDE, None, 1e-6, 1e6),
    )


def _yarn(metadata: Metadata, prefix: str, theta: float, truncate: bool) -> RopeSpec:
    if theta <= 1:
        metadata.refuse(prefix + BASE, f"must be above 1 with 'yarn', not {theta:g}")
    factor = metadata.number(prefix + FACTOR, None, 1.0, MAX_FACTOR)
    fast = metadata.number(prefix + FAST, 32.0, 1e-6, 1e6)
    slow = metadata.number(prefix + SLOW, 1.0, 1e-6, 1e6)
    if slow >= fast:
        metadata.refuse(prefix + FAST, f"must be above the {slow:g} of yarn_beta_slow, not {fast:g}")
    original = metadata.integer(prefix + ORIGINAL, maximum=MAX_POSITIONS)
    if reason := too_many_positions(factor, original):
        metadata.refuse(prefix + FACTOR, reason)
    amplitude = _yarn_amplitude(factor, 1.0)
    if logarithm := metadata.number(prefix + YARN_LOGARITHM, 0.0, 0.0, 1e6):  # mscale_all_dim; mscale is 1
        amplitude /= _yarn_amplitude(factor, logarithm)
    # Converters write here the amplitude that transformers uses, and llama.cpp applies it a second time. So
    # only values are supported with which both agree.
    for name, only in ((EXTRAPOLATION, 1.0), (YARN_AMPLITUDE, amplitude)):
        value = metadata.number(prefix + name, only)
        if not math.isclose(value, only, rel_tol=1e-6):
            metadata.refuse(prefix + name, f"{value:g} is not supported (supported: {only:g})")
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
        amplitude=amplitude,
    )


def _yarn_amplitude(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def _factors(model: GgufModel, name: str, count: int) -> tuple[float, ...]:
    """Return the divisors of the frequencies of `count` pairs of dimensions, from the tensor `name`."""
    info = model.tensors.get(name)
    if info is None:
        model.metadata.refuse(name, "is missing")
    if info.type.name != "F32" or info.shape != (count,):
        model.metadata.refuse(name, f"must be F32 [{count}], not {info.type.name} {list(info.shape)}")
    factors = np.frombuffer(model.stored(name).tobytes(), "<f4")
    if not ((factors >= 1e-6) & (factors <= MAX_THETA)).all():
        model.metadata.refuse(name, "must hold positive numbers")
    return tuple(factors.tolist())
