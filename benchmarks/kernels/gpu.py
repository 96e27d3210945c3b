"""Speed on a GPU: decoding, prefill and speculation of Llama shapes, compared with what the device can do.

The floor of a step is the time in which the device could read its bytes and compute its matrix products, at
the rates that a copy and a matrix product reach on it. Models are made on the device: random weights, and for
speculation the packaged pair inflated to the shape.

    python -m benchmarks.kernels.gpu --shape 8B
"""

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.kernels.gpu_models import SHAPES, InflatedWeights, RandomWeights, inflated
from benchmarks.options import parse
from benchmarks.report import PACKAGED_PAIR, table, write
from streamserve import embedded
from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import DRAFT, Drafter, StepPlan
from streamserve.engine.engine import Engine
from streamserve.execution.backends.cuda.chains import DeviceChains
from streamserve.execution.backends.cuda.executor import DeviceExecutor
from streamserve.execution.backends.cuda.graphs import NoGraphs
from streamserve.execution.backends.cuda.runner import Runner
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.execution.formats.quantization import parse_format
from streamserve.execution.loading.device import DeviceBackend
from streamserve.execution.model.spec import ModelSpec
from streamserve.execution.profile.floor import StepFloor
from streamserve.protocol.messages import Cancel, DraftVerified, Event, ModelInfo, Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.controller import Speculation, default_cost

PROMPT = 512
MAX_LEN = 16384
BLOCK_SIZE = 16
COPIED = 8 << 30


@dataclass(frozen=True)
class Rates:
    """Rates that the device reaches: bytes a second of a copy (read and written), and operations a second of
    a bf16 matrix product."""

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

    def engine(self, speculation: Speculation | None = None, sequences: int = 256) -> Engine:
        """Return a fresh engine; without `speculation` it has no drafter."""
        config = EngineConfig(
            num_blocks=self.blocks, block_size=BLOCK_SIZE, max_model_len=MAX_LEN, max_num_seqs=sequences,
            max_num_batched_tokens=2048, max_chunk=2048, enable_prefix_caching=False,
        )  # fmt: skip
        info = ModelInfo(
            architecture=self.spec.architecture, parameters=0, vocab_size=self.spec.vocab_size,
            max_model_len=MAX_LEN, eos_token_ids=self.spec.eos_token_ids, weight_bytes=0, dtype="bfloat16",
            row_invariant=False, fingerprint="bench",
        )  # fmt: skip
        executor = DeviceExecutor(self.runner, self.spec.eos_token_ids)
        drafter = self.drafter if speculation else None
        return Engine(config, info, executor, time.perf_counter, drafter, speculation)


def make(
    weights: RandomWeights | InflatedWeights,
    blocks: int,
    draft: InflatedWeights | None = None,
    quantization: str = "none",
) -> Bench:
    """Load a model, with weights rounded to `quantization`, and a draft model, onto the device."""
    device = torch.device("cuda")
    backend = DeviceBackend.on(device, 1024, MAX_LEN)
    dtype = torch.bfloat16
    model = backend.model(weights, weights.spec, dtype, parse_format(quantization))
    cache = backend.cache(weights.spec, blocks, BLOCK_SIZE, dtype)
    runner, drafter = backend.runner(model, cache), None
    if draft:
        draft_cache = backend.cache(draft.spec, blocks, BLOCK_SIZE, dtype)
        draft_model = backend.model(draft, draft.spec, dtype)
        passes = backend.runner(draft_model, draft_cache)
        drafter = ModelDrafter(passes, draft_cache, DRAFT, chains=DeviceChains(passes, runner))
    return Bench(weights.spec, runner, blocks, drafter)


def submit(engine: Engine, count: int, prompts: Sequence[list[int]], params: SamplingParams) -> None:
    """Submit `count` requests."""
    for number in range(count):
        prompt, arrival = prompts[number % len(prompts)], engine.clock()
        engine.handle(Submit(f"r{number}", prompt, params, outputs={0: []}, arrival=arrival))


def prefilled(engine: Engine) -> list[Event]:
    """Run steps until all prompts are computed; return the events."""
    events: list[Event] = []
    while any(sequence.pending > 1 for sequence in engine.scheduler.sequences.values()):
        events += engine.step()
    return events


GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


def decode(bench: Bench, batch: int, floor: StepFloor, rates: Rates, steps: int) -> dict[str, float]:
    """Return the milliseconds of a decoding step of `batch` sequences, its hardware floor, and the device's
    part of it: the time in which the same captured passes are replayed one after another."""
    engine = bench.engine(sequences=batch)
    submit(engine, batch, [[7 + n] * PROMPT for n in range(batch)], GREEDY)
    prefilled(engine)
    for _ in range(6):
        engine.step()
    plans = noted_plans(engine, 1)
    gc.collect()
    gc.freeze()  # as a worker does
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times.append(1000 * (time.perf_counter() - started))
    ahead = engine.steps_ahead
    step, device = statistics.median(times), 1000 * seconds_of(bench.runner.replay)
    gc.unfreeze()
    work = floor.work(plans[-1].spans)
    least = 1000 * max(work.bytes / rates.bandwidth, work.operations / rates.matrix_rate)
    for number in range(batch):
        engine.handle(Cancel(f"r{number}"))
    while engine.has_work:
        engine.step()
    return {
        "batch": batch, "step ms": step, "floor ms": least, "share of floor": least / step,
        "device ms": device, "gap": 1 - device / step, "tokens/s": batch / step * 1000, "ahead": ahead,
    }  # fmt: skip


def noted_plans(engine: Engine, last: int | None = None) -> deque[StepPlan]:
    """Record the plans that the engine launches from now on; with `last`, only the latest ones."""
    plans: deque[StepPlan] = deque(maxlen=last)
    executor: Any = engine.executor
    launch = executor.launch

    def noting(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    executor.launch = noting
    return plans


def prefill(bench: Bench, length: int, floor: StepFloor) -> dict[str, float]:
    """Return seconds to the first token of a prompt of `length` tokens, and the share of the matrix rate."""
    seconds, operations = [], 0
    for number in range(4):
        engine = bench.engine()
        plans = noted_plans(engine)
        submit(engine, 1, [[11 + number] * length], GREEDY)
        torch.cuda.synchronize()
        started = time.perf_counter()
        prefilled(engine)
        seconds.append(time.perf_counter() - started)
        operations = sum(floor.work(plan.spans).operations for plan in plans if plan.spans)
    best = statistics.median(seconds[1:])
    return {"prompt": length, "seconds": best, "tokens/s": length / best, "operations/s": operations / best}


TEXTS = (
    "What is 12 + 7?", "Who are you?", "Write a function that adds two numbers.", "List three fruits.",
    "Rewrite in upper case: the cat sat on the mat.", "Tell me about the sea.", "Count from 1 to 20.",
    "Write a function that returns the largest of two numbers.",
)  # fmt: skip


def speculate(bench: Bench, policy: str, streams: int) -> dict[str, Any]:
    """Return tokens a second of `streams` concurrent texts with a speculation policy, and the texts."""
    tokenizer = Tokenizer.from_file(str(embedded.path("embedded") / "tokenizer.json"))
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids for text in TEXTS
    ]
    speculation = Speculation(parse_policy(policy), default_cost)
    rounds = max(2, len(prompts) // streams)
    before = max(WARM_ROUNDS, rounds)  # During these rounds the policy learns, and graphs are captured.
    tokens, seconds, texts, accepted = 0, 0.0, dict[str, list[int]](), 0
    for number in range(before + rounds):
        engine = bench.engine(speculation, streams)
        params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
        for stream in range(streams):
            prompt = prompts[(number * streams + stream) % len(prompts)]
            name, arrival = f"{number % rounds} {stream}", engine.clock()
            engine.handle(Submit(name, prompt, params, outputs={0: []}, arrival=arrival))
        first = prefilled(engine)
        started, events = time.perf_counter(), list[Event]()
        while engine.has_work:
            events += engine.step()
        if number >= before:
            seconds += time.perf_counter() - started
            tokens += sum(isinstance(event, Token) for event in events)
            accepted += sum(event.accepted for event in events if isinstance(event, DraftVerified))
            for event in first + events:
                if isinstance(event, Token):
                    texts.setdefault(event.request, []).append(event.token)
    return {
        "policy": policy, "streams": streams, "tokens/s": tokens / seconds, "accepted": accepted / tokens,
        "texts": texts,
    }  # fmt: skip


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
    with cProfile.Profile() as host:
        for _ in range(20):
            engine.step()
    print(f"\nbatch {batch}: the host's functions in 20 steps, by own time")
    pstats.Stats(host).strip_dirs().sort_stats("tottime").print_stats(16)


INFLATED = {
    "8B": (("embedded", 4096, 40, 32, 16, 14336), ("embedded-draft", 2048, 8, 32, 32, 8192)),
    "1B": (("embedded", 1024, 64, 16, 8, 4096), ("embedded-draft", 512, 4, 8, 8, 2048)),
}
"""Shapes of target and draft for speculation. The target has about the parameters in the name, the draft less
than a tenth."""

POLICIES = ("goodput", "fixed:4", "fixed:7")
WARM_ROUNDS = 8
"""Rounds of texts that are run before the measured rounds."""


def speculation(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Measure speculation with an inflated pair."""
    target, draft = (
        InflatedWeights(name, inflated(name, *sizes), device) for name, *sizes in INFLATED[args.shape]
    )
    bench = make(target, 8000, draft)
    figures = []
    for streams in args.streams or (1, 8, 64):
        plain = speculate(bench, "off", streams)
        for policy in args.policy or POLICIES:
            measured = speculate(bench, policy, streams)
            same = sum(plain["texts"][name] == text for name, text in measured.pop("texts").items())
            measured |= {"plain tokens/s": plain["tokens/s"], "same texts": same / len(plain["texts"])}
            measured["speedup"] = measured["tokens/s"] / plain["tokens/s"]
            figures.append(measured)
    columns = list(figures[0])
    rows = [[f"{row[c]:.4g}" if not isinstance(row[c], str) else row[c] for c in columns] for row in figures]
    table(f"Speculation, inflated pair of {args.shape}", columns, rows)
    return figures


def models(args: argparse.Namespace, device: torch.device, rates: Rates) -> dict[str, Any]:
    """Measure decoding and prefill with random weights."""
    spec = SHAPES[args.shape]
    bench = make(RandomWeights(spec, device), 20000, quantization=args.quantization)
    format = parse_format(args.quantization)
    floor = StepFloor(spec, 2, BLOCK_SIZE, rates.bandwidth, rates.matrix_rate, format)
    decoding = [decode(bench, batch, floor, rates, args.steps) for batch in args.batch or (1, 8, 64, 256)]
    columns = list(decoding[0])
    table(f"Decoding, {args.shape}", columns, [[f"{row[c]:.4g}" for c in columns] for row in decoding])
    filled = prefill(bench, args.prompt, floor)
    filled["share of the matrix rate"] = filled["operations/s"] / rates.matrix_rate
    table("Prefill", list(filled), [[f"{value:.4g}" for value in filled.values()]])
    if args.profile:
        for batch in (1, 256):
            profile_step(bench, batch)
    return {"decoding": decoding, "prefill": filled}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument(
        "--batch", type=int, action="append", help="number of sequences in the decoding batch"
    )
    parser.add_argument(
        "--streams", type=int, action="append", help="number of concurrent texts with speculation"
    )
    policies = "a speculation policy, repeatable; by default goodput, fixed:4 and fixed:7"
    parser.add_argument("--policy", action="append", help=policies)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompt", type=int, default=8192, help="prompt tokens of the prefill measurement")
    parser.add_argument("--quantization", default="none", help="round the weights: int8, int4, int4:GROUP")
    parser.add_argument("--no-speculation", action="store_true", help="measure decoding and prefill only")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    args = parse(parser, batch=[1], streams=[1], policy=["fixed:4"], steps=1, prompt=64)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    device = torch.device("cuda")
    rates = measure_rates(device)
    device_name = torch.cuda.get_device_name()
    print(device_name, f"{rates.bandwidth / 1e12:.2f} TB/s, {rates.matrix_rate / 1e12:.0f} TFLOP/s")
    figures: dict[str, Any] = {"device": device_name, **vars(rates)}
    with torch.inference_mode():
        figures |= models(args, device, rates)
        name = f"gpu-{args.shape.lower()}" + ("" if args.quantization == "none" else f"-{args.quantization}")
        path = write(name.replace(":", "-"), vars(args), figures, PACKAGED_PAIR)
        if not args.no_speculation:
            gc.collect()
            torch.cuda.empty_cache()
            figures["speculation"] = speculation(args, device)
            write(path.stem, vars(args), figures, PACKAGED_PAIR)
    print(path)


if __name__ == "__main__":
    main()
