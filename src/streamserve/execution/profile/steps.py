"""The steps that a profile measures: the grid of points, and their plans on a separate KV pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import SequenceState, Span, StepPlan
from streamserve.contracts.tree import root
from streamserve.execution.compute.executor import TorchExecutor
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.compute.swap import HostPool
from streamserve.execution.loading.load import make_attention
from streamserve.execution.loading.loaded import Loaded
from streamserve.protocol.sampling import SamplingParams

TOKEN_STRIDE = 7919
"""Difference between the ids of consecutive tokens, so that they choose different experts."""


@dataclass(frozen=True)
class Point:
    """A step to measure: `query_tokens` after `context` cached tokens, both distributed evenly over
    `sequences`."""

    query_tokens: int
    context: int
    sequences: int

    def shares(self) -> list[tuple[int, int]]:
        """Return, for each sequence, its query tokens and its cached tokens."""
        tokens = _split_evenly(self.query_tokens, self.sequences)
        return list(zip(tokens, _split_evenly(self.context, self.sequences), strict=True))

    def blocks(self, block_size: int) -> int:
        """Return the number of KV blocks of all sequences."""
        return sum(_blocks(tokens + context, block_size) for tokens, context in self.shares())


def _split_evenly(total: int, parts: int) -> list[int]:
    return [total // parts + (number < total % parts) for number in range(parts)]


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def grid_points(
    query_tokens: Sequence[int], contexts: Sequence[int], limits: EngineConfig, max_blocks: int
) -> list[list[Point]]:
    """Return a line of points over `contexts` for each of `query_tokens`, without lines that exceed the
    engine's limits or a pool of `max_blocks` blocks. One query token without context is always included. Each
    query token has a separate sequence, up to the engine's limit."""
    context_lengths = sorted({min(context, limits.max_model_len - 1) for context in contexts} | {0})
    context_lengths = [
        length for length in context_lengths if not length or _fits(Point(1, length, 1), limits, max_blocks)
    ]
    lines = [
        [Point(count, length, min(count, limits.max_num_seqs)) for length in context_lengths]
        for count in query_tokens
    ]
    return [
        line
        for line in lines
        if line[0].query_tokens == 1 or all(_fits(point, limits, max_blocks) for point in line)
    ]


def span_points(query_tokens: int, context: int, limits: EngineConfig, max_blocks: int) -> list[Point]:
    """Return two points with a span of `query_tokens` of one sequence: without context, and after up to
    `context` tokens. Returns none unless both are within the limits."""
    cached = min(context, limits.max_model_len - query_tokens)
    points = [Point(query_tokens, 0, 1), Point(query_tokens, cached, 1)]
    return points if cached > 0 and all(_fits(point, limits, max_blocks) for point in points) else []


def _fits(point: Point, limits: EngineConfig, max_blocks: int) -> bool:
    longest = max(tokens + context for tokens, context in point.shares())
    return (
        longest <= limits.max_model_len
        and point.query_tokens <= limits.max_num_batched_tokens
        and point.blocks(limits.block_size) <= max_blocks
    )


class Steps:
    """Runs points on a loaded model, over a separate KV pool that is freed with this object. Executors keep a
    state for each sequence, so every point has different sequences. All of them use the same blocks."""

    def __init__(self, loaded: Loaded, points: Sequence[Point]) -> None:
        size, model = loaded.engine_config.block_size, loaded.model
        num_blocks = max(point.blocks(size) for point in points)
        cache = KVCache(model.spec, num_blocks, size, model.dtype, quantized=loaded.cache.quantized)
        # Write all pages: reads of pages that were never written do not go to memory. (Integers become 0.)
        cache.data.fill_(0.01)
        self._cache = cache
        self._executor = TorchExecutor(model, cache, make_attention(cache, model.spec, loaded.pool), ())
        self.plans: dict[Point, StepPlan] = {}
        first = 0
        for point in points:
            spans = spans_of(point, first, size, model.spec.vocab_size)
            self.plans[point] = StepPlan(1, [], [], [], spans)
            first += point.sequences
        states = [_state(span) for plan in self.plans.values() for span in plan.spans]
        self._executor.run(StepPlan(0, states, [], [], []))

    def swaps(self, blocks: int) -> tuple[HostPool, list[tuple[int, int]], list[tuple[int, int]]]:
        """Return a host pool of `blocks` blocks, but no more than the cache has, and the copies (out, in) of
        all its blocks."""
        count = min(blocks, self._cache.num_blocks)
        numbers = [(block, block) for block in range(count)]
        return HostPool([self._cache], count), numbers, numbers

    def call(self, point: Point) -> Callable[[], object]:
        """Return a function that runs the point's step: layers, logits of one row for each sequence, and
        sampling."""
        plan = self.plans[point]
        return lambda: self._executor.run(plan)


def spans_of(point: Point, first: int, block_size: int, vocabulary: int) -> list[Span]:
    """Return the spans of a point, whose sequences have ids from `first` on. Its tokens differ, so that they
    choose different experts."""
    spans, block, token = [], 0, first
    for number, (query_tokens, context) in enumerate(point.shares()):
        blocks = list(range(block, block + _blocks(query_tokens + context, block_size)))
        block += len(blocks)
        tokens = [(token + i) * TOKEN_STRIDE % vocabulary for i in range(query_tokens)]
        token += query_tokens
        spans.append(Span(first + number, context, tokens, blocks, tree=root(tokens[-1]), choices=(0,)))
    return spans


def _state(span: Span) -> SequenceState:
    prompt = [0] * (span.start + span.query_tokens)
    return SequenceState(span.sequence, 0, SamplingParams(temperature=0.0), prompt, [])
