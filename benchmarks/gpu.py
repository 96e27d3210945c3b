"""Speed on a GPU: decoding, prefill and speculation of Llama shapes, compared with what the device can do.

The floor of a step is the time in which the device could read its bytes and compute its matrix products, at
the rates that a copy and a matrix product reach on it. Models are made on the device: random weights, and for
speculation the packaged pair inflated to the shape.

    python -m benchmarks.gpu --shape 8B
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_models import SHAPES, InflatedWeights, RandomWeights
from benchmarks.report import table, write
from streamserve.baselines.speculation import parse_policy
from streamserve.engine.engine import Engine
from streamserve.engine.plan import DRAFT, Drafter
from streamserve.execution.cuda.executor import DeviceExecutor
from streamserve.execution.cuda.graphs import NoGraphs
from streamserve.execution.cuda.load import DeviceBackend
from streamserve.execution.cuda.runner import Runner
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.execution.profile.floor import StepFloor
from streamserve.execution.spec import ModelSpec
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.messages import ModelInfo, Submit
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.controller import Speculation, default_cost

PROMPT = 512
MAX_LEN = 16384
BLOCK_SIZE = 16
COPIED = 8 << 30


@dataclass(frozen=True)
class Rates:
    """What the device reaches: bytes a second of a copy (read and written), and operations a second of a
    bf16 matrix product."""

    bandwidth: float
    matrix_rate: float


def seconds_of(work: Callable[[], object], repetitions: int = 10) -> float:
    """Return the median seconds of `work` on the device."""
    work()
    times = []
    for _ in range(repetitions):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / 1000)
    return statistics.median(times)


def measure_rates(device: torch.device) -> Rates:
    """Measure the device's rates with PyTorch's copy and matrix product."""
    copy = seconds_of(_copy_half(torch.empty(COPIED, dtype=torch.uint8, device=device)))
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    return Rates(COPIED / copy, 2 * 8192**3 / seconds_of(lambda: a @ a))


def _copy_half(memory: torch.Tensor) -> Callable[[], object]:
    half = len(memory) // 2
    return lambda: memory[:half].copy_(memory[half:])


@dataclass(frozen=True)
class Bench:
    """A model on the device, ready to run engines."""

    spec: ModelSpec
    runner: Runner
    blocks: int
    drafter: Drafter | None

    def engine(self, policy: str = "off", sequences: int = 256) -> Engine:
        """Return a fresh engine."""
        config = EngineConfig(
            num_blocks=self.blocks, block_size=BLOCK_SIZE, max_model_len=MAX_LEN, max_num_seqs=sequences,
            max_num_batched_tokens=2048, max_chunk=2048, enable_prefix_caching=False,
        )  # fmt: skip
        info = ModelInfo(
            architecture=self.spec.architecture, parameters=0, vocab_size=self.spec.vocab_size,
            max_model_len=MAX_LEN, eos_token_ids=(), weight_bytes=0, dtype="bfloat16", row_invariant=False,
            fingerprint="bench",
        )  # fmt: skip
        drafter = None if policy == "off" else self.drafter
        speculation = Speculation(parse_policy(policy), default_cost)
        return Engine(config, info, DeviceExecutor(self.runner, ()), time.perf_counter, drafter, speculation)


def make(
    weights: RandomWeights | InflatedWeights, blocks: int, draft: InflatedWeights | None = None
) -> Bench:
    """Load a model, and a draft model, onto the device."""
    device = torch.device("cuda")
    backend = DeviceBackend.on(device, 1024, MAX_LEN)
    dtype = torch.bfloat16
    model = backend.model(weights, weights.spec, dtype)
    cache = backend.cache(weights.spec, blocks, BLOCK_SIZE, dtype)
    drafter = None
    if draft:
        draft_cache = backend.cache(draft.spec, blocks, BLOCK_SIZE, dtype)
        draft_model = backend.model(draft, draft.spec, dtype)
        drafter = ModelDrafter(backend.runner(draft_model, draft_cache), draft_cache, DRAFT)
    return Bench(weights.spec, backend.runner(model, cache), blocks, drafter)


def submit(engine: Engine, count: int, prompts: Sequence[list[int]], params: SamplingParams) -> None:
    """Submit `count` requests."""
    for number in range(count):
        engine.handle(Submit(f"r{number}", 0, prompts[number % len(prompts)], params, {0: []}, float(number)))


def prefilled(engine: Engine) -> None:
    """Run steps until all prompts are computed."""
    while any(sequence.pending > 1 for sequence in engine.scheduler.sequences.values()):
        engine.step()


GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


def decode(bench: Bench, batch: int, floor: StepFloor, steps: int) -> dict[str, float]:
    """Return milliseconds of a decoding step of `batch` sequences, its floor, and the device's idle share."""
    engine = bench.engine(sequences=batch)
    submit(engine, batch, [[7 + n] * PROMPT for n in range(batch)], GREEDY)
    prefilled(engine)
    for _ in range(4):
        engine.step()
    torch.cuda.synchronize()
    times, busy, plans = [], [], []
    run = engine.executor.run

    def timed(plan: Any) -> Any:
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        engine.executor.launch(plan)
        ended.record()
        result = engine.executor.finish()
        busy.append(begun.elapsed_time(ended))
        plans.append(plan)
        return result

    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times.append(1000 * (time.perf_counter() - started))
    engine.executor.run = timed  # type: ignore[method-assign]
    for _ in range(4):
        engine.step()
    engine.executor.run = run  # type: ignore[method-assign]
    least = 1000 * floor(plans[-1])
    step = statistics.median(times)
    return {
        "batch": batch, "step ms": step, "floor ms": least, "share of floor": least / step,
        "device ms": statistics.median(busy), "tokens/s": batch / step * 1000,
    }  # fmt: skip


def prefill(bench: Bench, length: int, floor: StepFloor) -> dict[str, float]:
    """Return seconds to the first token of a prompt of `length` tokens, and the share of the matrix rate."""
    seconds, operations = [], 0
    for number in range(4):
        engine = bench.engine()
        submit(engine, 1, [[11 + number] * length], GREEDY)
        plans: list[Any] = []
        run = engine.executor.run
        engine.executor.run = lambda plan, run=run: (plans.append(plan), run(plan))[1]  # type: ignore
        torch.cuda.synchronize()
        started = time.perf_counter()
        prefilled(engine)
        seconds.append(time.perf_counter() - started)
        operations = sum(floor.work(plan.spans).operations for plan in plans if plan.spans)
    best = statistics.median(seconds[1:])
    return {"prompt": length, "seconds": best, "tokens/s": length / best, "operations/s": operations / best}


def profile_step(bench: Bench, batch: int) -> None:
    """Print the kernels of a decoding step by their time on the device, without graphs."""
    engine = bench.engine(sequences=batch)
    graphs, bench.runner.graphs = bench.runner.graphs, NoGraphs()
    submit(engine, batch, [[7 + n] * PROMPT for n in range(batch)], GREEDY)
    prefilled(engine)
    engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            engine.step()
    bench.runner.graphs = graphs
    total: dict[str, list[float]] = {}
    for event in profiler.key_averages():
        total[event.key[:80]] = [event.self_device_time_total / 3, event.count / 3]
    print(f"\nbatch {batch}: kernels of a step, µs and launches")
    for key, (microseconds, count) in sorted(total.items(), key=lambda item: -item[1][0])[:14]:
        print(f"{microseconds:10.1f} {count:7.1f}  {key}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prompt for prefill")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    device = torch.device("cuda")
    rates = measure_rates(device)
    print(
        torch.cuda.get_device_name(),
        f"{rates.bandwidth / 1e12:.2f} TB/s, {rates.matrix_rate / 1e12:.0f} TFLOP/s",
    )
    spec = SHAPES[args.shape]
    with torch.inference_mode():
        bench = make(RandomWeights(spec, device), blocks=20000)
        floor = StepFloor(spec, 2, BLOCK_SIZE, rates.bandwidth, rates.matrix_rate)
        decoding = [decode(bench, batch, floor, args.steps) for batch in args.batch or (1, 8, 64, 256)]
        columns = list(decoding[0])
        table(f"Decoding, {args.shape}", columns, [[f"{row[c]:.4g}" for c in columns] for row in decoding])
        filled = prefill(bench, args.prompt, floor)
        filled["share of the matrix rate"] = filled["operations/s"] / rates.matrix_rate
        table("Prefill", list(filled), [[f"{value:.4g}" for value in filled.values()]])
        if args.profile:
            for batch in (1, 256):
                profile_step(bench, batch)
    figures = {
        "device": torch.cuda.get_device_name(), "bandwidth": rates.bandwidth,
        "matrix_rate": rates.matrix_rate, "decoding": decoding, "prefill": filled,
        "graphs": vars(bench.runner.graphs).get("captured"),
    }  # fmt: skip
    print(write(f"gpu-{args.shape.lower()}", vars(args), figures))


if __name__ == "__main__":
    main()
