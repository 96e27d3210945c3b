"""The steps that a profile measures: their grid, and their plans on a separate KV pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamserve.engine.plan import SequenceState, Span, StepPlan
from streamserve.execution.executor import TorchExecutor
from streamserve.execution.kv_cache import KVCache
from streamserve.execution.load import Loaded, attention_on
from streamserve.execution.swap import HostPool
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.tree import root


@dataclass(frozen=True)
class Point:
    """A step: `rows` query rows after `context` cached tokens, both distributed evenly over `sequences`."""

    rows: int
    context: int
    sequences: int

    def shares(self) -> list[tuple[int, int]]:
        """Return rows and context of each sequence."""
        rows, context = _spread(self.rows, self.sequences), _spread(self.context, self.sequences)
        return list(zip(rows, context, strict=True))

    def blocks(self, block_size: int) -> int:
        return sum(_blocks(rows + context, block_size) for rows, context in self.shares())


def _spread(total: int, parts: int) -> list[int]:
    return [total // parts + (number < total % parts) for number in range(parts)]


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def grid_points(
    rows: Sequence[int], contexts: Sequence[int], limits: EngineConfig, room: int
) -> list[list[Point]]:
    """Return a line of points over `contexts` for each of `rows`, as far as the engine's limits and a
    pool of `room` blocks allow; one row without context always. As many sequences as there are rows, up
    to the limit."""
    lengths = sorted({min(context, limits.max_model_len - 1) for context in contexts} | {0})
    lengths = [one for one in lengths if not one or _fits(Point(1, one, 1), limits, room)]
    lines = [[Point(count, one, min(count, limits.max_num_seqs)) for one in lengths] for count in rows]
    return [line for line in lines if line[0].rows == 1 or all(_fits(point, limits, room) for point in line)]


def span_points(rows: int, context: int, limits: EngineConfig, room: int) -> list[Point]:
    """Return a span of `rows` of one sequence without context, and after up to `context` tokens; an empty
    list where the limits do not fit both."""
    behind = min(context, limits.max_model_len - rows)
    points = [Point(rows, 0, 1), Point(rows, behind, 1)]
    return points if behind > 0 and all(_fits(point, limits, room) for point in points) else []


def _fits(point: Point, limits: EngineConfig, room: int) -> bool:
    longest = max(rows + context for rows, context in point.shares())
    return (
        longest <= limits.max_model_len
        and point.rows <= limits.max_num_batched_tokens
        and point.blocks(limits.block_size) <= room
    )


class Steps:
    """Runs points on a loaded model, with KV that is freed with this object. Executors keep a state for each
    sequence: every point has different sequences, and all of them use the same blocks."""

    def __init__(self, loaded: Loaded, points: Sequence[Point]) -> None:
        size, model = loaded.engine_config.block_size, loaded.model
        cache = KVCache(model.spec, max(point.blocks(size) for point in points), size, model.dtype)
        cache.data.fill_(0.01)  # pages that were never written are not read from memory
        self._cache = cache
        self._executor = TorchExecutor(model, cache, attention_on(cache, model.spec, loaded.team), ())
        self.plans: dict[Point, StepPlan] = {}
        first = 0
        for point in points:
            self.plans[point] = StepPlan(1, [], [], [], _spans(point, first, size))
            first += point.sequences
        states = [_state(span) for plan in self.plans.values() for span in plan.spans]
        self._executor.run(StepPlan(0, states, [], [], []))

    def swaps(self, blocks: int) -> tuple[HostPool, list[tuple[int, int]], list[tuple[int, int]]]:
        """Return a host pool of `blocks` blocks, or the cache's number if less, and the copies that fill and
        empty it."""
        count = min(blocks, self._cache.num_blocks)
        numbers = [(block, block) for block in range(count)]
        return HostPool([self._cache], count), numbers, numbers

    def call(self, point: Point) -> Callable[[], object]:
        """Return a function that runs the point's step: layers, logits of one row a sequence, and
        sampling."""
        plan = self.plans[point]
        return lambda: self._executor.run(plan)


def _spans(point: Point, first: int, block_size: int) -> list[Span]:
    spans, block = [], 0
    for number, (rows, context) in enumerate(point.shares()):
        blocks = list(range(block, block + _blocks(rows + context, block_size)))
        block += len(blocks)
        spans.append(Span(first + number, context, [0] * rows, blocks, tree=root(0), choices=(0,)))
    return spans


def _state(span: Span) -> SequenceState:
    prompt = [0] * (span.start + span.rows)
    return SequenceState(span.sequence, 0, SamplingParams(temperature=0.0), prompt, [])
