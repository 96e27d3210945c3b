"""Measure a profile: memory bandwidth, matrix rate and steps of loaded models, in rounds.

A round measures everything once, so that compared values are measured under the same conditions. Results are
medians over rounds.
"""

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path

import msgspec
import torch

from streamserve.contracts.cost import Line, SwapCost, fit, fit_line, further_pairs
from streamserve.execution.backends.native.library import Path as KernelPath
from streamserve.execution.backends.native.library import ThreadPool
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.backends.native.paths import multiplier_rate, name_of
from streamserve.execution.compute.kv_cache import bytes_per_block
from streamserve.execution.formats.quantization import quantize
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.model.linear import Linear
from streamserve.execution.profile.floor import StepFloor, step_floor
from streamserve.execution.profile.lock import BackgroundLoad, exclusive_measurement
from streamserve.execution.profile.profile import Profile, ProfileStore, Subject, this_machine
from streamserve.execution.profile.steps import Point, Steps, grid_points, span_points
from streamserve.protocol.cost_curve import CostCurve
from streamserve.system.available_memory import available_bytes

log = logging.getLogger(__name__)

KV_BYTES = 1 << 30
"""Maximum bytes of the KV pool that steps are measured on; a quarter of the free memory if that is less."""

READ_BYTES = 256 << 20
"""Maximum bytes that are read to measure the bandwidth: more than this process's share of the CPU caches."""

MATRIX_SHAPE = (8192, 1024)
"""Outputs and inputs of the weight used to measure the matrix rate."""

SWAP_BLOCK_COUNTS = (1, 4, 16, 64)
"""Numbers of blocks that are copied to a host pool at a time, and back."""

MAX_MEDIAN_DISAGREEMENT = 0.05
"""Maximum relative difference between even and odd rounds, as the median over series."""
MAX_DISAGREEMENT = 0.25
"""Maximum relative difference between even and odd rounds of any series."""

WAIT_SECONDS = 20.0
"""Seconds that a starting server waits for other processes to finish measuring."""

MIN_SECONDS = 0.002
"""Calls that take less are repeated until they have taken this many seconds together."""


@dataclass(frozen=True)
class Effort:
    """The extent of a measurement.

    * Steps with each number of `query_tokens`, over sequences with each of `contexts` tokens in total.
    * One sequence with a span of `span` query tokens.
    * Matrix products of `matrix_rows` rows.
    * `rounds`; if these do not agree, up to `max_rounds`. After `seconds`, only required series are measured.
    """

    query_tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    span: int
    matrix_rows: tuple[int, ...]
    rounds: int
    seconds: float
    max_rounds: int = 0


FULL = Effort(
    (1, 2, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512), (0, 512, 2048, 6144), 128, (256, 512), 5, 60.0, 8
)
QUICK = Effort((1, 4, 8, 16, 64, 256), (0, 2048), 32, (256,), 2, 1.0, 6)


@dataclass
class Series:
    """A measurement that is made once in each round. Series are measured in order of `rank`; if time is
    short, the highest ranks are omitted."""

    call: Callable[[], object]
    rank: float
    required: bool = True
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def difference(self) -> float:
        """The relative difference between the medians of even and odd rounds; infinite before the second
        round."""
        if len(self.seconds) < 2:
            return math.inf
        even, odd = statistics.median(self.seconds[::2]), statistics.median(self.seconds[1::2])
        return max(even, odd) / min(even, odd) - 1


def rounds_agree(series: Iterable[Series]) -> bool:
    """Return whether even and odd rounds agree, over all series that were measured more than once."""
    differences = [measurement.difference for measurement in series if len(measurement.seconds) > 1]
    return (
        bool(differences)
        and statistics.median(differences) <= MAX_MEDIAN_DISAGREEMENT
        and max(differences) <= MAX_DISAGREEMENT
    )


def run_rounds(series: Iterable[Series], effort: Effort, advance: Callable[[], None]) -> None:
    """Measure all `series` in rounds, until the rounds agree. `advance` is called after each measurement.
    Required series are measured twice even after the time limit, so that two rounds can be compared."""
    ranked = sorted(series, key=lambda measurement: measurement.rank)
    started = time.perf_counter()
    for number in range(max(effort.rounds, effort.max_rounds)):
        if number >= effort.rounds and rounds_agree(ranked):
            return
        for measurement in ranked:
            overdue = time.perf_counter() - started > effort.seconds
            if overdue and number > 1:
                return
            if not overdue or measurement.required:
                if not number:
                    measurement.call()  # warm up: the first call has costs that a step does not have
                measurement.seconds.append(seconds_of(measurement.call))
            advance()


def seconds_of(call: Callable[[], object], minimum: float = MIN_SECONDS) -> float:
    """Return the seconds of one call: the mean of several if it takes less than `minimum` seconds."""
    started, calls, passed = time.perf_counter(), 0, 0.0
    while not calls or passed < minimum:
        call()
        calls += 1
        passed = time.perf_counter() - started
    return passed / calls


class SwapCopies:
    """Measurements of copies between the KV pool of `steps` and a host pool, by number of blocks."""

    def __init__(self, steps: Steps, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        host_pool, out, back = steps.swaps(max(SWAP_BLOCK_COUNTS))
        counts = [count for count in SWAP_BLOCK_COUNTS if count <= host_pool.num_blocks]
        self._out = {count: Series(partial(host_pool.copy, out[:count], ()), 0) for count in counts}
        self._back = {count: Series(partial(host_pool.copy, (), back[:count]), 0) for count in counts}

    @property
    def series(self) -> list[Series]:
        return [*self._out.values(), *self._back.values()]

    def cost(self) -> SwapCost:
        """Return the cost by bytes, as lines fitted to the measurements."""
        return SwapCost(self._line(self._out), self._line(self._back))

    def _line(self, copies: dict[int, Series]) -> Line:
        sizes = [count * self._block_bytes for count in copies]
        return fit_line(sizes, [series.median for series in copies.values()])


def read_bytes(floor: StepFloor) -> int:
    """Return the number of bytes to read for the bandwidth: the size of the weights, up to READ_BYTES. So a
    model that fits into a CPU cache is compared with the cache's bandwidth."""
    return min(max(floor.weight_bytes, 1 << 20), READ_BYTES) // 8 * 8


class Bench:
    """The measurements of one loaded model, and the profile computed from them."""

    def __init__(self, name: str, loaded: Loaded, effort: Effort) -> None:
        self._name, self._loaded, self._effort = name, loaded, effort
        spec, dtype, limits = loaded.model.spec, loaded.model.dtype, loaded.engine_config
        self._kv_token_bytes = bytes_per_block(spec, 1, dtype, loaded.cache.quantized)
        self._work = step_floor(loaded, 1.0, 1.0)
        self._weight_bytes = self._work.weight_bytes
        self._read_bytes = read_bytes(self._work)
        max_blocks = min(KV_BYTES, available_bytes() // 4) // (self._kv_token_bytes * limits.block_size)
        self._grid = grid_points(effort.query_tokens, effort.contexts, limits, max_blocks)
        self._spans = span_points(effort.span, self._grid[0][-1].context, limits, max_blocks)
        self._steps = Steps(loaded, [point for line in (*self._grid, self._spans) for point in line])
        self._swaps = SwapCopies(self._steps, self._kv_token_bytes * limits.block_size)
        self._read = Series(reader(loaded.pool, self._read_bytes), -2)
        self._products = {rows: Series(_product(loaded, rows), -1) for rows in effort.matrix_rows}
        required = self._grid[:2]
        self._points = {
            point: Series(
                self._steps.call(point), point.query_tokens, any(point in line for line in required)
            )
            for point in self._steps.plans
        }

    def series(self) -> list[Series]:
        products, points = self._products.values(), self._points.values()
        return [self._read, *products, *self._swaps.series, *points]

    def profile(self, stable: bool) -> Profile:
        """Return the profile by the measurements so far. `stable`: no other process measured or computed
        meanwhile."""
        lines = [line for line in self._grid if all(self._points[point].seconds for point in line)]
        bandwidth, matrix_rate = self._rates([point for line in lines for point in line])
        multipliers = rate_of_multipliers(self._loaded)
        floor = step_floor(self._loaded, bandwidth, max(matrix_rate, multipliers))
        curve = fit(
            [line[0].query_tokens for line in lines],
            [point.context * self._kv_token_bytes for point in lines[0]],
            [[self._points[point].median for point in line] for line in lines],
            token_seconds=2 * self._work.token_parameters / matrix_rate,
            byte_seconds=1 / bandwidth,
        )
        return Profile(
            subject=subject_of(self._loaded),
            model=self._name,
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
            quick=self._effort is QUICK,
            stable=stable and rounds_agree(self._points.values()),
            rounds=max(len(series.seconds) for series in self._points.values()),
            bandwidth=bandwidth,
            matrix_rate=matrix_rate,
            multiplier_rate=multipliers,
            weight_bytes=self._weight_bytes,
            kv_token_bytes=self._kv_token_bytes,
            cost=msgspec.structs.replace(curve, pair_seconds=self._pair_seconds(curve)),
            swap=self._swaps.cost(),
            floor=tuple(tuple(floor(self._steps.plans[point]) for point in line) for line in lines),
        )

    def _rates(self, points: Sequence[Point]) -> tuple[float, float]:
        """Return the highest observed bandwidth and matrix rate, whole steps included. Steps with experts are
        left out of the bandwidth, because the bytes that they read are not known exactly."""
        bandwidths = [self._read_bytes / self._read.median]
        operations = 2 * MATRIX_SHAPE[0] * MATRIX_SHAPE[1]
        rates = [rows * operations / series.median for rows, series in self._products.items()]
        for point in points:
            work, seconds = self._work.work(self._steps.plans[point].spans), self._points[point].median
            if self._loaded.model.spec.experts is None:
                bandwidths.append(work.bytes / seconds)
            rates.append(work.operations / seconds)
        return max(bandwidths), max(rates)

    def _pair_seconds(self, curve: CostCurve) -> float:
        """Return the seconds for each pair of a query token and a context token: the additional cost of a
        long span after much context, beyond the same span without context and the reading of the context."""
        if not self._spans or not all(self._points[point].seconds for point in self._spans):
            return 0.0
        no_context, long_context = self._spans
        cost = self._points[long_context].median - self._points[no_context].median
        reading = curve(long_context.query_tokens, long_context.context * self._kv_token_bytes) - curve(
            long_context.query_tokens
        )
        pairs = further_pairs(long_context.query_tokens, long_context.context) - further_pairs(
            no_context.query_tokens, no_context.context
        )
        return max((cost - reading) / pairs, 0.0)


def reader(pool: ThreadPool | None, size: int, parts: int = 1) -> Callable[[], object]:
    """Return a function that reads the next of `parts` equal parts of `size` bytes with all threads."""
    part = size // parts // 8 * 8
    parts_read = cycle(range(parts))
    if pool is None:
        numbers = torch.ones(parts, part // 8, dtype=torch.int64)
        return lambda: numbers[next(parts_read)].sum()
    memory = pool.memory(parts * part)
    memory.fill_(1)

    def read() -> None:
        pool.library.ss_read(pool.handle, memory.data_ptr() + next(parts_read) * part, part // 8)

    return read


def _product(loaded: Loaded, rows: int) -> Callable[[], object]:
    """Return a function that multiplies `rows` rows with a weight, in the formats of the model's linear
    maps."""
    weight = torch.full(MATRIX_SHAPE, 0.5, dtype=loaded.model.dtype)
    pool, format = loaded.pool, loaded.format
    rounded = quantize(weight, format) if format else weight
    linear = NativeLinear(pool, rounded, dtype=weight.dtype) if pool else Linear(weight)
    x = torch.full((rows, MATRIX_SHAPE[1]), 0.5, dtype=loaded.model.dtype)
    return lambda: linear(x)


def rate_of_multipliers(loaded: Loaded) -> float:
    """Return the rate of all threads' multipliers on the model's kernel path, in operations a second; 0 if
    plain torch computes. 8-bit floats are multiplied in float32."""
    pool, format = loaded.pool, loaded.format
    if pool is None:
        return 0.0
    path = pool.path(loaded.model.dtype)
    if format and format.floating:
        return multiplier_rate(pool, min(path, KernelPath.AVX512), 32)
    return multiplier_rate(pool, path, 8 if format else 16)


def subject_of(loaded: Loaded) -> Subject:
    """Return the subject of a profile of this loaded model."""
    backend, threads = "reference", torch.get_num_threads()
    if loaded.pool is not None:
        path = name_of(loaded.pool.path(loaded.model.dtype))
        backend = f"native-{Path(loaded.pool.library._name).stem[:8]}-{path}"
        threads = loaded.pool.threads
    info = loaded.model_info
    width = info.dtype if loaded.format is None else f"{info.dtype}-{loaded.format.kind}"
    width += "" if info.kv_cache_dtype == "auto" else f"-kv-{info.kv_cache_dtype}"
    return Subject(this_machine(threads), info.fingerprint, width, backend)


@torch.inference_mode()
def measure(
    models: Sequence[tuple[str, Loaded]],
    effort: Effort,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stable: bool = True,
) -> list[Profile]:
    """Return profiles of the named models, measured in the same rounds. `progress` receives the number of
    finished measurements and the total. Profiles are stable if `stable` is set, the rounds agree and, if the
    system reports it, no other process computed meanwhile."""
    load = BackgroundLoad(max(subject_of(loaded).machine.threads for _, loaded in models))
    benches = [Bench(name, loaded, effort) for name, loaded in models]
    series = [measurement for bench in benches for measurement in bench.series()]
    total = len(series) * effort.rounds
    done = itertools.count(1)
    run_rounds(series, effort, lambda: progress(min(next(done), total), total))
    stable = stable and not load.disturbs
    return [bench.profile(stable) for bench in benches]


def load_or_measure_profile(
    name: str, loaded: Loaded, store: ProfileStore, wait: float = WAIT_SECONDS
) -> Profile | None:
    """Return the stored profile of a model, or measure a quick one and store it. Waits at most `wait` seconds
    for other processes that measure; after that the measurement counts as unstable. Any error is logged, and
    None returned: the model is then served without a profile, like models on GPUs."""
    if not loaded.can_be_profiled:
        log.info("no profile is measured on a GPU: the costs of steps are learned while it serves")
        return None
    try:
        profile = store.read(subject_of(loaded))
        if profile is None:
            with exclusive_measurement(store.folder, wait) as exclusive:
                profile = store.read(subject_of(loaded))  # another process may have measured it meanwhile
                if profile is None:
                    began = time.perf_counter()
                    (profile,) = measure([(name, loaded)], QUICK, stable=exclusive)
                    path, seconds = store.write(profile), time.perf_counter() - began
                    log.info("measured this machine, once, in %.1f s (--no-profile leaves it out)", seconds)
                    log.debug("%s; stored in %s", profile.summary, path)
        return profile
    except Exception as error:
        log.warning(
            "the model could not be profiled and is served without a profile: %s: %s",
            type(error).__name__,
            error,
        )
        return None
