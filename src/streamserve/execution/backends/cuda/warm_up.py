"""Warm-up: compile a model's kernels and capture the passes of decoding steps before the model is ready.

    main thread   weights of all layers ────────────────────▶ KV pool ─ capture ─▶ ready
    threads       weights of the first layers ─ compile ───▶

Triton keeps compiled kernels on the disk, so a later start only reads them.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from streamserve.contracts.plan import Drafter
from streamserve.execution.backends.cuda.attention import TILES
from streamserve.execution.backends.cuda.chains import DeviceChains
from streamserve.execution.backends.cuda.graphs import ROWS, bucket
from streamserve.execution.backends.cuda.passes import (
    ForwardShape,
    SampleShape,
    chain_forward_shapes,
    chain_sample_shapes,
    forward_shapes,
    sample_shapes,
)
from streamserve.execution.backends.cuda.runner import Runner
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.execution.model.spec import ModelSpec

log = logging.getLogger(__name__)

CHAINS = 16
CHAIN_LEVELS = 8
"""Maximum number of chains, and of draft tokens in a chain, that are captured at warm-up. Larger ones are
captured when they occur."""

MakeRunner = Callable[[], Runner]


def capture(runner: Runner, sequences: int, drafter: Drafter | None = None) -> None:
    """Capture the passes of steps of up to `sequences` sequences, the largest first, and the chains of a
    `drafter` on the device. Passes that are too large for capturing are run once."""
    began = time.monotonic()
    runner.warm_up(forward_shapes(sequences), sample_shapes(sequences))
    log.info("captured the passes of up to %d sequences in %.1f s", sequences, time.monotonic() - began)
    if isinstance(drafter, ModelDrafter) and isinstance(drafter.chains, DeviceChains):
        _capture_chains(runner, drafter.chains, sequences)


def _capture_chains(runner: Runner, chains: DeviceChains, sequences: int) -> None:
    """Capture the passes that draft and verify chains for up to CHAINS of the sequences."""
    began, count = time.monotonic(), min(CHAINS, sequences)
    rows = bucket(count * (CHAIN_LEVELS + 1)) or ROWS[-1]
    chains.warm_up(count, CHAIN_LEVELS)
    runner.warm_up(chain_forward_shapes(rows, CHAIN_LEVELS), chain_sample_shapes(rows, CHAIN_LEVELS))
    log.info("captured chains of draft tokens for %d sequences in %.1f s", count, time.monotonic() - began)


def layers_of_all_kinds(spec: ModelSpec) -> int:
    """Return the smallest number of a model's first layers that includes every kind of layer."""
    kinds = [
        (spec.windows[number], spec.ropes[number] is None, spec.experts_of(number))
        for number in range(spec.num_layers)
    ]
    return 1 + max(map(kinds.index, kinds))


@contextmanager
def compiling(load: Callable[[], MakeRunner], sequences: int, device: torch.device) -> Iterator[None]:
    """Compile kernels in threads while the `with` body loads weights. `load` loads a model of the first
    layers, and returns a function that makes runners of it, one for each thread."""
    with ThreadPoolExecutor(1, "compile") as thread:
        compiled = thread.submit(_compile, load, sequences, device)
        yield
    if error := compiled.exception():  # the first requests compile the missing kernels
        log.warning("kernels were not compiled while the weights were loaded: %s", error)


def _compile(load: Callable[[], MakeRunner], sequences: int, device: torch.device) -> None:
    """Compile the kernels of all passes: first run passes with different kernels in parallel threads, then
    all passes."""
    began = time.monotonic()
    _use(device)
    make_runner, count = load(), len(TILES)
    one_tile = [ForwardShape(1, 0, tuple(i == n for i in range(count)), n == 0) for n in range(count)]

    def run(forwards: Sequence[ForwardShape], samples: Sequence[SampleShape]) -> None:
        make_runner().warm_up(forwards, samples)

    with ThreadPoolExecutor(count + 1, "compile", _use, (device,)) as threads:
        runs = [threads.submit(run, [shape], []) for shape in one_tile]
        runs.append(threads.submit(run, [], [SampleShape(1, 1)]))
        for each in runs:
            each.result()
    run(forward_shapes(sequences), sample_shapes(sequences))
    log.info("compiled kernels in %.1f s", time.monotonic() - began)


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
