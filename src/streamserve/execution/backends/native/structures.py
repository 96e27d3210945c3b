"""The kernels' structures, field by field as in the headers of cpp/. A library whose fields are elsewhere is
refused (abi.py)."""

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from struct import Struct

PANEL = 64
CHUNK = 32
"""The constants PANEL and CHUNK of cpp/common.h."""

LORA_MAPS = 4
"""Linear maps of a layer that adapters add to; cpp/lora.h: LORA_MAPS."""

MAX_QUERY_GROUP = 256
"""Upper bound of the query heads that share a key-value head; cpp/attention.h: MAX_QUERIES."""


class LinearStruct(ctypes.Structure):
    """The structure `Linear` of cpp/common.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("order", c_void_p),
        ("table", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("n_padded", c_int32),
        ("k_padded", c_int32),
        ("path", c_int32),
        ("type", c_int32),
        ("numbers", c_int32),
        ("bits", c_int32),
        ("group", c_int32),
        ("scale_type", c_int32),
    )


class SpanStruct(ctypes.Structure):
    """The structure `Span` of cpp/attention.h."""

    _fields_ = (
        ("blocks", c_void_p),
        ("parents", c_void_p),
        ("row", c_int32),
        ("rows", c_int32),
        ("start", c_int32),
        ("linear", c_int32),
    )


class ScoringStruct(ctypes.Structure):
    """The structure `Scoring` of cpp/attention.h."""

    _fields_ = (("scale", c_float), ("cap", c_float))


class GatingStruct(ctypes.Structure):
    """The structure `Gating` of cpp/gemm.h."""

    _fields_ = (("activation", c_int32), ("alpha", c_float), ("limit", c_float))


class CacheLayerStruct(ctypes.Structure):
    """The structure `CacheLayer` of cpp/attention.h."""

    _fields_ = (
        ("data", c_void_p),
        ("block_size", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("type", c_int32),
        ("quantized", c_int32),
    )


class ExpertsStruct(ctypes.Structure):
    """The structure `Experts` of cpp/layers.h."""

    _fields_ = (
        ("router", LinearStruct),
        ("gate_up", POINTER(LinearStruct)),
        ("down", POINTER(LinearStruct)),
        ("correction", c_void_p),
        ("count", c_int32),
        ("chosen", c_int32),
        ("groups", c_int32),
        ("chosen_groups", c_int32),
        ("shared", c_int32),
        ("gated", c_int32),
        ("normalized", c_int32),
        ("sigmoid", c_int32),
        ("scale", c_float),
    )


class LayerStruct(ctypes.Structure):
    """The structure `Layer` of cpp/layers.h."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("head_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        ("sinks", c_void_p),
        ("experts", POINTER(ExpertsStruct)),
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("window", c_int32),
        ("rope", c_int32),
    )


class ModelStruct(ctypes.Structure):
    """The structure `Model` of cpp/layers.h."""

    _fields_ = (
        ("layers", POINTER(LayerStruct)),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("rotary", c_int32),
        ("path", c_int32),
        ("type", c_int32),
        ("wide_norms", c_int32),
        ("joint_head_norm", c_int32),
        ("epsilon", c_float),
        ("residual_scale", c_float),
        ("scoring", ScoringStruct),
        ("gating", GatingStruct),
    )


class LowRankColumnsStruct(ctypes.Structure):
    """The structure `LowRankColumns` of cpp/lora.h."""

    _fields_ = (("offset", c_int64), ("first", c_int32), ("ranks", c_int32))


class LowRankStruct(ctypes.Structure):
    """The structure `LowRank` of cpp/lora.h."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        ("scales", c_void_p),
        ("columns", c_void_p),
        ("rank", c_int32),
        ("chunks", c_int32),
    )


class LoraStruct(ctypes.Structure):
    """The structure `Lora` of cpp/lora.h."""

    _fields_ = (
        ("adapters", POINTER(POINTER(LowRankStruct))),
        ("adapter_of", c_void_p),
        ("count", c_int32),
        ("max_rank", c_int32),
    )


class StepStruct(ctypes.Structure):
    """The structure `Step` of cpp/layers.h."""

    _fields_ = (
        ("spans", POINTER(SpanStruct)),
        ("slots", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("query_scales", c_void_p),
        ("lora", POINTER(LoraStruct)),
        ("span_count", c_int32),
        ("rows", c_int32),
    )


class CacheStruct(ctypes.Structure):
    """The structure `Cache` of cpp/layers.h."""

    _fields_ = (
        ("data", c_void_p),
        ("layer_stride", c_size_t),
        ("written", c_void_p),
        ("block_size", c_int32),
        ("quantized", c_int32),
    )


class DrawStruct(ctypes.Structure):
    """The structure `Draw` of cpp/sampling.h."""

    _fields_ = (
        ("scores", c_void_p),
        ("seed", c_uint64),
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_score", c_double),
        ("row", c_int32),
        ("top_k", c_int32),
        ("choice", c_uint32),
        ("index", c_uint32),
    )


_CODES = {c_void_p: "P", c_uint64: "Q", c_double: "d", c_int32: "i", c_uint32: "I"}


def packer(structure: type[ctypes.Structure]) -> Struct:
    """Return a struct.Struct that packs the fields of a structure of plain numbers, in a fraction of the time
    that ctypes needs to make the structure."""
    packed = Struct("".join(_CODES[kind] for _, kind in structure._fields_))  # type: ignore[misc]
    assert packed.size == ctypes.sizeof(structure)
    return packed
