"""Attention over the paged cache, compared with the multipliers' rate and with reading its KV once.

A chunk of a prompt is attended at the end of contexts of several lengths, then one row of each of several
sequences. Calls of the kernel alone are measured: in a model all layers of a step are one call. KV in 16 and
8 bits is measured in the same rounds, one after another; a result is the median over rounds.

    python -m benchmarks.kernels.attention --threads 2 --rounds 7
"""

import argparse
import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.kernels import reader, seconds
from benchmarks.options import parse, pick
from benchmarks.report import SIMULATED, table, write
from streamserve.contracts.plan import Span
from streamserve.execution.backends.native import library
from streamserve.execution.backends.native.attention import Spans
from streamserve.execution.backends.native.library import TYPES, ThreadPool, kernels
from streamserve.execution.backends.native.paths import multiplier_rate, name_of
from streamserve.execution.backends.native.structures import CacheLayerStruct
from streamserve.execution.compute.kv_cache import KVCache, bytes_per_block
from streamserve.execution.model.layout import lay_out
from streamserve.execution.model.rope_spec import RopeSpec
from streamserve.execution.model.spec import ModelSpec, Multipliers

HEADS = {"345 M": (15, 5, 64), "1 B": (32, 8, 64), "8 B": (32, 8, 128)}
"""Query heads, key-value heads and head size, by model."""

BLOCK = 16
DTYPE = torch.bfloat16
LAYERS = 4
"""Number of caches that are attended in turn, so that no cache's KV stays in the processor's cache."""


@dataclass(frozen=True)
class Step:
    """`streams` sequences of `context` tokens, of which the last `rows` are attended."""

    streams: int
    rows: int
    context: int

    def __str__(self) -> str:
        return f"{self.streams} × {self.rows} rows at {self.context}"

    def pairs(self) -> int:
        """Return the number of (row, key) pairs."""
        first = self.context - self.rows + 1
        return self.streams * self.rows * (first + self.context) // 2


STEPS = (
    Step(1, 512, 512),
    Step(1, 512, 1024),
    Step(1, 512, 2048),
    Step(1, 512, 6144),
    Step(1, 1, 2048),
    Step(8, 1, 2048),
    Step(32, 1, 1024),
    Step(8, 5, 1024),
)


def prepare(pool: ThreadPool, heads: Sequence[int], step: Step, quantized: bool) -> Callable[[], None]:
    """Return a function that attends the step in all layers."""
    queries, keys, dim = heads
    blocks = -(-step.context // BLOCK)
    spec = _spec(queries, keys, dim)
    cache = KVCache(spec, blocks * step.streams, BLOCK, DTYPE, quantized=quantized)
    if quantized:
        cache.data.random_(-127, 127)
        cache.data[..., -4:] = torch.tensor([0.01]).view(torch.int8)
    else:
        cache.data.normal_()
    table = np.random.default_rng(0).permutation(blocks * step.streams).reshape(step.streams, -1)
    start = step.context - step.rows
    spans = [Span(0, start, [0] * step.rows, row.tolist(), None, ()) for row in table]
    pool.large_pages(cache.data)
    planned = Spans(lay_out(spans, BLOCK))
    rows = step.streams * step.rows
    qkv = torch.randn(rows, queries + 2 * keys, dim).to(DTYPE)
    out = torch.empty(rows, queries, dim, dtype=DTYPE)
    layers = [
        CacheLayerStruct(
            data=cache.data[layer].data_ptr(),
            block_size=BLOCK,
            kv_heads=keys,
            dim=dim,
            type=TYPES[DTYPE],
            quantized=quantized,
        )
        for layer in range(LAYERS)
    ]
    path, scale = pool.path(DTYPE), dim**-0.5

    def run() -> None:
        struct, to = planned.step(), out.data_ptr()
        for layer in layers:
            pool.library.ss_attend(
                pool.handle, ctypes.byref(struct), ctypes.byref(layer), qkv.data_ptr(), queries, 0, scale,
                0.0, None, path, to,
            )  # fmt: skip
        cache.written += LAYERS

    return run


def _spec(queries: int, keys: int, dim: int) -> ModelSpec:
    """Return a model spec with these heads. Attention uses no other field."""
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=1,
        hidden_size=queries * dim,
        intermediate_size=1,
        num_layers=LAYERS,
        num_heads=queries,
        num_kv_heads=keys,
        head_dim=dim,
        rms_norm_eps=1e-6,
        rotary_dim=dim,
        ropes=(RopeSpec(10_000.0),) * LAYERS,
        windows=(None,) * LAYERS,
        max_position_embeddings=1 << 20,
        tied_embeddings=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        multipliers=Multipliers(dim**-0.5),
        dtype=None,
        eos_token_ids=(),
    )


def measure(pool: ThreadPool, heads: Sequence[int], step: Step, rounds: int, peak: float) -> dict[str, Any]:
    """Return the microseconds of a layer with KV in 16 and 8 bits, and its shares of `peak` (operations a
    second) and of the memory bandwidth."""
    queries, keys, dim = heads
    spec = _spec(queries, keys, dim)
    calls = {name: prepare(pool, heads, step, name == "int8") for name in ("bfloat16", "int8")}
    size = step.streams * -(-step.context // BLOCK)
    reads = {name: reader(pool, size * bytes_per_block(spec, BLOCK, DTYPE, name == "int8")) for name in calls}
    times: dict[str, list[float]] = {}
    for number in range(-1, rounds):
        for name, call in calls.items():
            measured = {name: seconds([call]) / LAYERS, f"read {name}": seconds([reads[name]]) / LAYERS}
            for key, value in measured.items():
                if number >= 0:
                    times.setdefault(key, []).append(value)
    operations = 4 * step.pairs() * queries * dim
    result: dict[str, Any] = {"step": str(step)}
    for name in calls:
        call_seconds = statistics.median(times[name])
        result[name] = {
            "microseconds": 1e6 * call_seconds,
            "share of multipliers": operations / call_seconds / peak,
            "share of bandwidth": statistics.median(times[f"read {name}"]) / call_seconds,
        }
    return result


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--path", choices=[path.name for path in library.Path])
    args = parse(parser, threads=1, rounds=1, models=["345 M"])
    built = kernels()
    if built is None:
        raise SystemExit("there are no kernels to measure: see the log")
    torch.set_num_threads(1)  # torch's threads would spin on the cores of the kernels
    pool = ThreadPool(built, args.threads, library.Path[args.path] if args.path else None)
    chosen = pool.path(DTYPE)
    peak = multiplier_rate(pool, chosen, 16)
    results: dict[str, Any] = {}
    for name in args.models:
        results[name] = [
            measure(pool, HEADS[name], step, args.rounds, peak)
            for step in pick(STEPS, (Step(1, 1, 64), Step(2, 5, 64)))
        ]
        lines = [
            [
                entry["step"],
                *(
                    f"{one['microseconds']:.0f} µs, {one['share of multipliers']:.0%}, "
                    f"{one['share of bandwidth']:.0%}"
                    for one in (entry["bfloat16"], entry["int8"])
                ),
            ]
            for entry in results[name]
        ]
        table(f"{name}: µs a layer, shares of multipliers and bandwidth", ["step", "bfloat16", "int8"], lines)
    print(write(f"attention-{name_of(chosen)}", {**vars(args), "path": chosen.name}, results, SIMULATED))


if __name__ == "__main__":
    main()
