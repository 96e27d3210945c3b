"""Kernels with the argument types and constants of real launches. compile.py compiles them without a GPU."""

from dataclasses import dataclass
from typing import Any

import torch

from streamserve.execution.backends.cuda.attention import ITEM_FIELDS, TILES
from streamserve.execution.backends.cuda.kernels import (
    attention,
    expand,
    filters,
    layers,
    matrix,
    sampling,
    search,
    verify,
)
from streamserve.execution.backends.cuda.packing import Kind


@dataclass(frozen=True)
class KernelExample:
    """A kernel and an example of its launch. `signature` maps the kernel's arguments to Triton types
    ("*bf16", "i32", "fp32"), `constants` its compile-time arguments to values."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    """Integer arguments that are multiples of 16."""
    copied: int = 16
    """Alignment in bytes of the rows that are copied to shared memory."""
    programs: int = 1
    """Number of programs that must fit on a multiprocessor at once."""


def all_examples(capability: int) -> list[KernelExample]:
    """Return the examples of all kernels for a device of `capability`."""
    return [
        *attention_examples(capability),
        *expand_examples(),
        *filter_examples(),
        *layer_examples(),
        *matrix_examples(capability),
        *sampling_examples(),
        *verify_examples(),
    ]


def attention_examples(capability: int) -> list[KernelExample]:
    """Return example launches: for a model with 32 heads of 128 dimensions, four to a key-value head, on a
    device of this compute capability."""
    pointers = dict.fromkeys(("q", "cache", "cache_scales", "out"), "*bf16")
    pointers |= dict.fromkeys(("tables", "limits", "firsts", "bits", "items", "starts"), "*i32")
    pointers |= {"partials": "*fp32", "partial_sums": "*fp32", "sinks": "*fp32", "table_stride": "i32"}
    pointers |= dict.fromkeys(("qk_scale", "softcap", "v_scale"), "fp32")
    sizes = {"OUT_STRIDE": 4096, "HEADS": 32, "DIM": 128, "PADDED_DIM": 128}
    fixed = sizes | {
        "Q_STRIDE": 6144, "KV_HEADS": 8, "PADDED_GROUP": 4, "BLOCK_SIZE": 16, "PRECISION": "tf32",
        "ITEM_FIELDS": ITEM_FIELDS, "UPCAST": False,
    }  # fmt: skip
    plain = {"SOFTCAP": False, "QUANTIZED": False, "SINKS": False}
    kinds: dict[str, dict[str, int]] = {
        "0 nodes": {"WORDS": 0, **plain}, "64 nodes": {"WORDS": 2, **plain},
        "8 bits": {"WORDS": 0, **plain, "QUANTIZED": True},
        "cap, sinks": {"WORDS": 0, "SOFTCAP": True, "QUANTIZED": False, "SINKS": True},
    }  # fmt: skip
    launches = []
    for index, tile in enumerate(TILES):
        for kind, options in kinds.items():
            launch = attention.choose_launch(
                tile, 128, torch.bfloat16, capability, options["QUANTIZED"], options["WORDS"] > 0
            )
            constants = fixed | {"INDEX": index, "TILE": tile, "KEYS": launch.keys} | options
            narrow = {"cache": "*i8", "cache_scales": "*fp32"} if options["QUANTIZED"] else {}
            signature = pointers | narrow | dict.fromkeys(constants, "constexpr")
            name = f"attend tile {tile}, {kind}"
            row_bytes = 4 if options["QUANTIZED"] else 16  # vectors of 132 or 256 bytes
            # A softcap takes 132 registers with Triton 3.9, 128 with 3.6.
            programs = min(launch.resident, 3) if options["SOFTCAP"] else launch.resident
            launches.append(
                KernelExample(
                    name, attention._attend, signature, constants, launch.warps, launch.stages,
                    copied=row_bytes, programs=programs,
                )
            )  # fmt: skip
    constants = sizes | {"PARTS": attention.COMBINED_PARTS, "SINKS": True}
    signature = {"combine": "*i32", "partials": "*fp32", "partial_sums": "*fp32", "sinks": "*fp32"}
    signature |= {"out": "*bf16"} | dict.fromkeys(constants, "constexpr")
    return [*launches, KernelExample("combine", attention._combine, signature, constants, 4)]


def expand_examples() -> list[KernelExample]:
    """Return an example launch: for a matrix of 4096 x 4096 with 4 bits."""
    signature = {"numbers": "*i16", "scales": "*bf16", "offsets": "*u8", "table": "*fp32", "out": "*bf16"}
    signature |= {"first": "i32", "outputs": "i32"}
    constants = {
        "K": 4096, "WORDS": 1024, "GROUP": 128, "GROUPS": 32, "PART": 64, "PARTS": 4, "ZEROS": True,
        "KIND": int(Kind.INTEGERS), "MINIMUMS": False, "PAIRS": True, "COLUMNS": expand.COLUMNS,
    }  # fmt: skip
    signature |= dict.fromkeys(constants, "constexpr")
    return [KernelExample("expand 4 bits", expand._expand, signature, constants)]


FILTER_TYPES = {
    "logits": "*fp32", "draws": "*i32", "peaks": "*fp32", "lows": "*fp32", "finite": "*i32",
    "thresholds": "*i64", "ranges": "*fp32", "plans": "*i32", "counts": "*i32", "weights": "*fp64",
    "members": "*i32", "sizes": "*i32", "vocabulary": "i32", "chunks": "i32",
}  # fmt: skip


def filter_example(name: str, kernel, warps: int, types: dict[str, str], **options: bool) -> KernelExample:
    """Return an example launch of `kernel`: for a vocabulary of 128 Ki tokens."""
    constants = filters.kernel_sizes(128 << 10) | options
    names = kernel.arg_names
    return KernelExample(
        name, kernel, {name: types[name] for name in names if name in types},
        {name: constants[name] for name in names if name in constants}, warps,
        aligned=tuple(name for name in ("vocabulary",) if name in names),
    )  # fmt: skip


def filter_examples() -> list[KernelExample]:
    """Return example launches of the kernels that filter tokens."""
    return [
        filter_example("filters: survey", filters._survey, filters.WARPS["survey"], FILTER_TYPES),
        filter_example("filters: histogram", filters._histogram, filters.WARPS["histogram"], FILTER_TYPES),
        filter_example("filters: bound", filters._bound, 1, FILTER_TYPES),
        filter_example(
            "filters: gather", filters._gather, filters.WARPS["gather"], FILTER_TYPES, AGAIN=False
        ),
        filter_example("filters: bound again", filters._bound_again, 1, FILTER_TYPES),
        filter_example(
            "filters: gather again", filters._gather, filters.WARPS["gather"], FILTER_TYPES, AGAIN=True
        ),
        filter_example("filters: search", search.search, filters.WARPS["search"], FILTER_TYPES),
    ]


def layer_examples() -> list[KernelExample]:
    """Return example launches: for a model with 4096 hidden dimensions."""
    b, i, f = "*bf16", "*i32", "fp32"
    norm = dict.fromkeys(("hidden", "delta", "weight", "post_norm", "out"), b)
    norm |= {"epsilon": f, "multiplier": f}
    normed = {"N": 4096, "PADDED_N": 4096, "ADD": True, "NORM": True, "WRITE": True}
    rotation = dict.fromkeys(("qkv", "head_norm", "cos", "sin", "cache", "cache_scales"), b)
    rotation |= {"positions": i, "slots": i, "epsilon": f}
    heads = {
        "HEADS": 32, "KV_HEADS": 8, "DIM": 128, "TURNED": 128, "HALF": 64, "REST": 0, "BLOCK_SIZE": 16,
        "ROTATE": True, "QUANTIZED": False, "GROUP": 8,
    }  # fmt: skip
    partial = heads | {"TURNED": 64, "HALF": 32, "REST": 64, "NORM": True, "QUANTIZED": True}
    gather = dict.fromkeys(("tokens", "results", "sources", "out"), i) | {"rows": "i32"}
    gates = {"gate_up": b, "out": b, "limit": f, "alpha": f}
    shape = {"N": 14336, "SIZE": layers.ELEMENTS}
    return [
        KernelExample("gather_tokens", layers._gather_tokens, gather, {"SIZE": 256}),
        KernelExample(
            "embed", layers._embed, {"table": b, "tokens": i, "out": b, "multiplier": f},
            {"HIDDEN": 4096, "SIZE": layers.ELEMENTS, "SCALED": True},
        ),
        KernelExample(
            "add_rms_norm", layers._add_rms_norm, norm, normed | {"POST": False, "SCALED": False}, 8
        ),
        KernelExample(
            "add_rms_norm, norms around", layers._add_rms_norm,
            norm | {"weight": "*fp32", "post_norm": "*fp32"}, normed | {"POST": True, "SCALED": False}, 8,
        ),
        KernelExample(
            "norm_jointly", layers._norm_jointly,
            {"qkv": b, "weight": "*fp32", "epsilon": f, "stride": "i32"},
            {"FIRST": 4096, "LAST": 5120, "PADDED": 4096}, 8,
        ),
        KernelExample("rotate_and_store", layers._rotate_and_store, rotation, heads | {"NORM": False}, 2),
        KernelExample(
            "rotate_and_store, normed", layers._rotate_and_store, rotation, heads | {"NORM": True}, 2
        ),
        KernelExample(
            "rotate_and_store, 8 bits", layers._rotate_and_store,
            rotation | {"cache": "*i8", "cache_scales": "*fp32"}, partial, 4,
        ),
        KernelExample("gate, silu", layers._gate, gates, shape | {"SILU": True, "CLAMPED": False}),
        KernelExample("gate, gelu", layers._gate, gates, shape | {"SILU": False, "CLAMPED": False}),
        KernelExample("gate, clamped", layers._gate, gates, shape | {"SILU": True, "CLAMPED": True}),
    ]  # fmt: skip


def matrix_examples(capability: int) -> list[KernelExample]:
    """Return example launches: for a 4096 x 4096 matrix on a device of this compute capability."""
    b, i = "*bf16", "*i32"
    pointers = {"x": b, "numbers": "*i16", "scales": b, "offsets": "*u8", "bias": b, "table": "*fp32"}
    pointers |= {"out": b, "partials": "*fp32", "rows": "i32", "x_stride": "i32"}
    pointers |= dict.fromkeys(("order", "experts", "firsts", "counts", "arrivals"), i)
    fixed = {
        "N": 4096, "K": 4096, "GROUP": 128, "GROUPS": 32, "PART": 64, "ZEROS": False,
        "MINIMUMS": False, "BIAS": False, "ROUTED": False, "SHARED": 1, "SPLITS": 1, "PRECISION": "tf32",
        "UPCAST": False, "PAIRS": True,
    }  # fmt: skip
    small = {"PART": 32, "GROUP": 32, "GROUPS": 128, "RUN": 1}
    four = {"KIND": int(Kind.INTEGERS), "WORDS": 1024, "PARTS": 4, "RUN": 2}
    eight = {"KIND": int(Kind.INTEGERS), "WORDS": 2048, "PARTS": 2, "RUN": 2}
    routed = {"ROUTED": True, "SHARED": 4, "BIAS": True}
    kinds = {
        "4 bits": four | {"ZEROS": True, "SPLITS": 4},
        "4 bits, groups of 64": four | {"ZEROS": True, "RUN": 1, "GROUP": 64, "GROUPS": 64},
        "4 bits, minimums": four | small | {"MINIMUMS": True},
        "8 bits, groups of 16": eight | small | {"PART": 16, "GROUP": 16, "GROUPS": 256},
        "8 bits": eight,
        "fp8": eight | {"KIND": int(Kind.E4M3)},
        "iq4": four | small | {"KIND": int(Kind.IQ4), "PAIRS": False},
    }
    experts = {
        "experts in mxfp4": four | routed | small | {"KIND": int(Kind.MXFP4)},
        "experts in bf16": routed
        | {"KIND": int(Kind.FLOATS), "WORDS": 4096, "PARTS": 1, "RUN": 1, "PAIRS": False},
    }
    launches, every = [], kinds | experts
    chosen = {1: every, 64: ("4 bits", "4 bits, groups of 64", *experts), 512: ("4 bits, minimums", "iq4")}
    for rows, names in chosen.items():
        for kind in names:
            constants = fixed | every[kind]
            launch = matrix.choose_launch(rows, constants["PART"], torch.bfloat16, capability)
            constants |= {"ROWS": launch.rows, "COLUMNS": launch.columns}
            signature = pointers | dict.fromkeys(constants, "constexpr")
            signature |= {"offsets": "*fp32"} if constants["MINIMUMS"] else {}
            signature |= {"scales": "*u8"} if constants["KIND"] == Kind.MXFP4 else {}
            signature |= {"numbers": b} if constants["KIND"] == Kind.FLOATS else {}
            name = f"multiply {launch.rows} rows, {kind}"
            shape = (launch.warps, launch.stages, ("x_stride",))
            programs = 2 if rows > 1 and constants["ZEROS"] else 1
            launches.append(
                KernelExample(name, matrix._multiply, signature, constants, *shape, programs=programs)
            )
    combine = {"outputs": b, "shares": "*fp32", "shared": b, "out": b}
    return [
        *launches,
        KernelExample(
            "combine experts", matrix._combine_experts, combine,
            {"N": 4096, "CHOSEN": 4, "SHARED": True, "SIZE": matrix.ELEMENTS},
        ),
    ]  # fmt: skip


def sampling_examples() -> list[KernelExample]:
    """Return example launches of the kernels that choose tokens."""
    types = FILTER_TYPES | {"estimates": "*fp32", "out": "*i32"}
    return [
        filter_example("choose: estimate", sampling._estimate, filters.WARPS["estimate"], types),
        filter_example("choose", sampling._choose, filters.WARPS["choose"], types),
    ]


def verify_examples() -> list[KernelExample]:
    """Return example launches: for trees of up to eight levels."""
    walked = ("chosen", "tokens", "parents", "firsts", "tokens_out", "paths_out", "lengths_out")
    moved = {"data": "*bf16"} | dict.fromkeys(("slots", "firsts", "paths", "lengths"), "*i32")
    sizes = {"KV_HEADS": 8, "BLOCK_SIZE": 16, "DIM": 128, "PADDED_DIM": 128, "DEPTH": 8}
    return [
        KernelExample(
            "walk_trees", verify._walk, dict.fromkeys(walked, "*i32"), {"DEPTH": 8, "NODES": 64}, 1
        ),
        KernelExample("compact", verify._compact, moved | {"layer_stride": "i64"}, sizes, 1),
    ]
