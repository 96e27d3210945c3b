"""A mixture of experts with the shape of Qwen3-30B-A3B in Q4_0, compared with llama.cpp on the same file.

    python -m benchmarks.kernels.mixture write               the file (17 GB), tensor by tensor
    python -m benchmarks.kernels.mixture run --rounds 2      each engine in turn, one in memory at a time
    python -m benchmarks.kernels.mixture run --layers 4      a quick try with fewer layers
    python -m benchmarks.kernels.mixture ready --rounds 5    seconds to the first token, the file in memory

It needs the environment of llama.cpp that `python -m benchmarks.engines.peers setup --peers llama.cpp` makes.
Weights are random, so that a batch's tokens spread over the experts as evenly as they ever do.
"""

import argparse
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from benchmarks import report
from benchmarks.engines.peers import setup
from benchmarks.engines.peers.__main__ import FOLDER
from benchmarks.engines.peers.adapters import OURS, PEERS
from benchmarks.engines.peers.adapters.gguf_file import add_tokenizer
from benchmarks.engines.peers.checkpoints import END, VOCABULARY, write_tokenizer
from benchmarks.engines.peers.engine import Engine
from benchmarks.engines.peers.measure import FIRST, FLOOR_WORK
from benchmarks.engines.peers.scenarios import SCENARIOS, Scenario, work
from benchmarks.options import cache, parse, pick

ENGINES = (OURS, "llama.cpp")
MEASURED = ("one", "8", "32", "prefill-1k")
CONTEXT = 4096
BLOCK, BLOCK_BYTES = 32, 18
"""Weights in a Q4_0 block, and bytes of a block."""
BITS = 8 * BLOCK_BYTES / BLOCK
Types = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Mixture:
    """The shape, with the names of transformers' configuration."""

    hidden: int = 2048
    layers: int = 48
    heads: int = 32
    kv_heads: int = 4
    head: int = 128
    experts: int = 128
    used: int = 8
    ffn: int = 768

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert of one layer."""
        return 3 * self.hidden * self.ffn * BITS / 8

    @property
    def shared_bytes(self) -> float:
        """Bytes that every step reads: attention, routers, and the head in 8 bits."""
        attention = self.hidden * self.head * 2 * (self.heads + self.kv_heads) * BITS / 8
        return self.layers * (attention + 4 * self.hidden * self.experts) + VOCABULARY * self.hidden * 1.0625

    @property
    def parameters(self) -> int:
        """Return the number of parameters in all matrices."""
        attention = self.hidden * self.head * 2 * (self.heads + self.kv_heads)
        return (
            self.layers * (attention + 3 * self.experts * self.hidden * self.ffn) + VOCABULARY * self.hidden
        )

    def step_bytes(self, rows: int) -> float:
        """Return the bytes that a step of `rows` tokens reads, if each token chooses its experts at
        random."""
        touched = self.experts * (1 - (1 - self.used / self.experts) ** rows)
        return self.shared_bytes + self.layers * touched * self.expert_bytes


SMALLEST = Mixture(hidden=256, heads=4, kv_heads=2, head=64, experts=4, used=2, ffn=64)
"""The shape of a smoke run."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("write", "run", "ready"))
    parser.add_argument("--layers", type=int, default=Mixture.layers)
    parser.add_argument(
        "--rounds", type=int, default=2, help="times to start each engine (default %(default)s)"
    )
    parser.add_argument(
        "--times", type=int, default=3, help="runs of each scenario after a start (default %(default)s)"
    )
    parser.add_argument("--kv-gib", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parse(parser, layers=1, rounds=1, times=1)
    shape = pick(Mixture(layers=args.layers), replace(SMALLEST, layers=args.layers))
    file = cache(args.folder) / "mixtures" / f"{args.layers}-layers" / "model.gguf"
    if not file.exists():
        write(shape, file)
    if args.command == "write":
        return
    if args.command == "ready":
        start(shape, file, args)
        return
    measured = measure(shape, file, args)
    rows = figures(shape, measured)
    print(json.dumps(rows, indent=2))
    if args.layers == Mixture.layers:
        settings = {**asdict(shape), "rounds": args.rounds, "times": args.times, "threads": _threads()}
        report.write("mixture", settings, rows, report.SIMULATED)


def write(shape: Mixture, file: Path) -> None:
    """Write the model to a file, one tensor at a time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_tokenizer(file.parent, CONTEXT)
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "qwen3moe")
    _add_shape(writer, shape)
    add_tokenizer(writer, json.loads((file.parent / "tokenizer.json").read_text()), END)
    for name, rows, columns, kind in tensors(shape):
        size = gguf.quant_shape_to_byte_shape((columns,), kind)[0] if kind != Types.F32 else 4 * columns
        dtype = np.dtype(np.float32 if kind == Types.F32 else np.uint8)
        stored = (*rows, columns if kind == Types.F32 else size)
        raw = None if kind == Types.F32 else kind
        writer.add_tensor_info(name, stored, dtype, int(np.prod(rows)) * size, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    with Progress(console=Console(stderr=True)) as progress:
        for _, rows, columns, kind in progress.track(list(tensors(shape)), description="writing"):
            writer.write_tensor_data(_content(rng, rows, columns, kind))
    writer.close()
    os.replace(part, file)
    print(f"{file}: {file.stat().st_size / 1e9:.1f} GB")


def tensors(shape: Mixture) -> Iterator[tuple[str, tuple[int, ...], int, Any]]:
    """Yield name, rows, columns and type of every tensor."""
    hidden, wide, narrow = shape.hidden, shape.heads * shape.head, shape.kv_heads * shape.head
    yield "token_embd.weight", (VOCABULARY,), hidden, Types.Q8_0
    yield "output_norm.weight", (), hidden, Types.F32
    for layer in range(shape.layers):
        for name, rows, columns, kind in (
            ("attn_norm", (), hidden, Types.F32),
            ("attn_q", (wide,), hidden, Types.Q4_0),
            ("attn_k", (narrow,), hidden, Types.Q4_0),
            ("attn_v", (narrow,), hidden, Types.Q4_0),
            ("attn_q_norm", (), shape.head, Types.F32),
            ("attn_k_norm", (), shape.head, Types.F32),
            ("attn_output", (hidden,), wide, Types.Q4_0),
            ("ffn_norm", (), hidden, Types.F32),
            ("ffn_gate_inp", (shape.experts,), hidden, Types.F32),
            ("ffn_gate_exps", (shape.experts, shape.ffn), hidden, Types.Q4_0),
            ("ffn_up_exps", (shape.experts, shape.ffn), hidden, Types.Q4_0),
            ("ffn_down_exps", (shape.experts, hidden), shape.ffn, Types.Q4_0),
        ):
            yield f"blk.{layer}.{name}.weight", rows, columns, kind


def _content(rng: np.random.Generator, rows: tuple[int, ...], columns: int, kind: Any) -> NDArray[Any]:
    """Return a tensor's content: ones, or random numbers with the spread of a trained model's logits."""
    if kind == Types.F32:
        if not rows:
            return np.ones(columns, np.float32)
        return rng.standard_normal((*rows, columns), np.float32) * np.float32(columns**-0.5)
    nbytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.frombuffer(rng.bytes(int(np.prod(rows)) * columns // BLOCK * nbytes), np.uint8).copy()
    blocks = blocks.reshape(-1, nbytes)
    # Standard deviations of random integers: 4.6 for 4 bits (from -8 on), 73.9 for 8 bits.
    scale = columns**-0.5 / 4.6 if kind == Types.Q4_0 else 3.0 * columns**-0.5 / 73.9
    blocks[:, :2] = np.full(1, scale, np.float16).view(np.uint8)
    if kind == Types.Q8_0:  # no weight: this token is never generated
        blocks[: columns // BLOCK, 2:] = 0
    return blocks.reshape(*rows, -1)


def _add_shape(writer: gguf.GGUFWriter, shape: Mixture) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_expert_feed_forward_length(shape.ffn)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.used)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)


def _threads() -> int:
    return len(os.sched_getaffinity(0))


def start(shape: Mixture, file: Path, args: argparse.Namespace) -> None:
    """Start each engine in turn, and print its seconds to the first token and its resident memory then."""
    seconds: dict[str, list[float]] = {name: [] for name in ENGINES}
    for number in range(args.rounds):
        for name in ENGINES if number % 2 == 0 else ENGINES[::-1]:
            engine = _start(name, shape, file, args)
            resident = engine.memory()["resident"]
            engine.end(10)
            seconds[name].append(engine.ready)
            print(f"{name}: ready after {engine.ready:.2f} s with {resident / 1e9:.2f} GB", flush=True)
    for name, measured in seconds.items():
        print(f"{name}: median {statistics.median(measured):.2f} s of {args.rounds}")


def measure(shape: Mixture, file: Path, args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return each engine's seconds by scenario, its seconds until ready, and its peak memory in bytes."""
    measured: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in (*ENGINES, "machine")}
    for number in range(args.rounds):
        for name in ENGINES if number % 2 == 0 else ENGINES[::-1]:
            engine = _start(name, shape, file, args)
            try:
                measured[name]["ready"].append(engine.ready)
                for scenario in MEASURED:
                    for time in range(args.times):
                        task = work(scenario, SCENARIOS[scenario], f"{number} {time}")
                        measured[name][scenario].append(engine.run(task)["seconds"])
                        print(f"{name}, {scenario}: {measured[name][scenario][-1]:.2f} s", flush=True)
                measured[name]["memory"].append(engine.memory()["resident"])
            finally:
                engine.end(10)
        machine = _start("machine", shape, file, args)
        bandwidth = machine.run(FLOOR_WORK)["answers"][0][0][0]
        measured["machine"]["bandwidth"].append(bandwidth)
        machine.end(0)
    return measured


def _start(name: str, shape: Mixture, file: Path, args: argparse.Namespace) -> Engine:
    """Start an engine, and return it once it has loaded the model and generated a token."""
    peer, cores = PEERS.get(name, PEERS[OURS]), tuple(sorted(os.sched_getaffinity(0)))
    module = peer.path if name in PEERS else "benchmarks.engines.peers.adapters.machine"
    options = {"draft": "none", "profile": False} if name == OURS else {}
    load = {
        "checkpoint": str(file),
        "converted": str(file.parent),
        "threads": len(cores),
        "kv_bytes": args.kv_gib << 30,
        "options": options if name in PEERS else {"in": shape.hidden, "out": shape.ffn},
    }
    return Engine(
        [str(setup.python(peer, args.folder)), "-m", "benchmarks.engines.peers.child", module],
        setup.variables(peer, cores),
        args.folder / "logs" / f"mixture-{name}.log",
        cores,
        load,
        work("first", FIRST, "") if name in PEERS else FLOOR_WORK,
    )


def figures(shape: Mixture, measured: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Return medians: tokens a second by scenario, the share of the bytes that a step must read, seconds
    until ready, and memory."""
    bandwidth = max(measured["machine"]["bandwidth"])
    rows: dict[str, Any] = {"parameters": shape.parameters, "bandwidth": bandwidth}
    for name in ENGINES:
        rows[name] = {
            "ready": statistics.median(measured[name]["ready"]),
            "memory": max(measured[name]["memory"]),
        }
        for scenario in MEASURED:
            seconds = statistics.median(measured[name][scenario])
            entry = {"value": SCENARIOS[scenario].tokens / seconds, "seconds": measured[name][scenario]}
            if SCENARIOS[scenario].out > 1:
                entry["share"] = _read_seconds(shape, SCENARIOS[scenario], bandwidth) / seconds
            rows[name][scenario] = entry
    return rows


def _read_seconds(shape: Mixture, scenario: Scenario, bandwidth: float) -> float:
    """Return the least seconds in which the weights of all steps are read."""
    rows = (scenario.streams * scenario.new, *[scenario.streams] * (scenario.out - 1))
    return sum(shape.step_bytes(count) for count in rows) / bandwidth


if __name__ == "__main__":
    main()
