"""The floor of a step: the least time in which this machine could read the step's bytes and compute its
matrix products, max(bytes / bandwidth, operations / matrix rate). No other work is counted, so no step
reaches it. Of a mixture of experts, the expected number of experts that the step's tokens choose is counted.
A step can read less if its tokens choose the same experts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from streamserve.contracts.plan import Span, StepPlan
from streamserve.execution.compute.kv_vectors import vector_bytes
from streamserve.execution.formats.quantization import WeightFormat
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.model.experts import is_routed
from streamserve.execution.model.shapes import head_bytes, layer_matrices, matrix_bytes
from streamserve.execution.model.spec import ModelSpec
from streamserve.execution.profile.profile import Profile


def floor_of(loaded: Loaded, profile: Profile) -> "StepFloor":
    """Return the floor of a loaded model's steps on a machine with this profile."""
    return step_floor(loaded, profile.bandwidth, profile.peak_rate)


def step_floor(loaded: Loaded, bandwidth: float, matrix_rate: float) -> "StepFloor":
    """Return the floor of a loaded model's steps, with `bandwidth` in bytes a second and `matrix_rate` in
    operations a second."""
    spec, dtype = loaded.model.spec, loaded.model.dtype
    return StepFloor(
        spec,
        dtype.itemsize,
        loaded.engine_config.block_size,
        bandwidth,
        matrix_rate,
        loaded.format,
        loaded.head,
        vector_bytes(spec.head_dim, dtype, loaded.cache.quantized),
    )


@dataclass(frozen=True)
class StepWork:
    """The minimum work of a step: `bytes` to be read, and `operations` of matrix products (two for each
    multiplication with addition)."""

    bytes: int
    operations: int


class StepFloor:
    """Computes the floor of a step, in seconds, from its plan.

    * `bandwidth` is in bytes a second, `matrix_rate` in operations a second.
    * `itemsize`: bytes of each unquantized weight, and of each number in the KV cache. `format`: the format
      of the layers' matrices, if they are quantized; `head`: the format of the head.
    * `kv_vector_bytes`: bytes of a key or value of one head; by default its dimensions times `itemsize`.
    * `layer_parameters`: number of weights of all layers. `token_parameters`: number of these weights that
      one token is multiplied by.
    """

    def __init__(
        self,
        spec: ModelSpec,
        itemsize: int,
        block_size: int,
        bandwidth: float,
        matrix_rate: float,
        format: WeightFormat | None = None,
        head: WeightFormat | None = None,
        kv_vector_bytes: int | None = None,
    ) -> None:
        self.layer_parameters = layer_matrices(spec)
        self.layer_bytes = matrix_bytes(spec, itemsize, format)
        self.token_parameters = self.layer_parameters
        self._experts = spec.experts
        if spec.experts:
            self._routed_bytes = matrix_bytes(spec, itemsize, format, is_routed)
            of_others = 1 - spec.experts.chosen / spec.experts.count
            self.token_parameters -= round(layer_matrices(spec, is_routed) * of_others)
        self.head_parameters = spec.vocab_size * spec.hidden_size
        self.head_bytes = head_bytes(spec, itemsize, head)
        self._block_size = block_size
        self._bandwidth = bandwidth
        self._matrix_rate = matrix_rate
        self._windows = Counter(spec.windows)
        self._query_size = spec.num_heads * spec.head_dim
        self._kv_bytes = 2 * spec.num_kv_heads * (kv_vector_bytes or spec.head_dim * itemsize)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that a step may read."""
        return self.layer_bytes + self.head_bytes

    def __call__(self, plan: StepPlan) -> float:
        return self.of_spans(plan.spans)

    def of_spans(self, spans: Sequence[Span]) -> float:
        """Return the floor of a step of these spans in seconds."""
        if not spans:
            return 0.0
        work = self.work(spans)
        return max(work.bytes / self._bandwidth, work.operations / self._matrix_rate)

    def work(self, spans: Sequence[Span]) -> StepWork:
        """Return the work of a step with these spans. The step reads each KV slot that any of the spans sees,
        and each weight once, with two exceptions: only the expected share of experts' weights, and the head
        only if tokens are sampled."""
        extents = [(span.start, span.query_tokens, span.blocks) for span in spans]
        query_tokens = sum(count for _, count, _ in extents)
        sampled = sum(len(span.tree.tokens) for span in spans if span.tree is not None)
        read = self.layer_bytes + (self.head_bytes if sampled else 0)
        if self._experts:
            read -= round(self._routed_bytes * (1 - self._experts.share_read(query_tokens)))
        products = query_tokens * self.token_parameters + sampled * self.head_parameters
        for window, layers in self._windows.items():
            slots, pairs = _visible(extents, window, self._block_size)
            read += layers * self._kv_bytes * slots
            products += layers * 2 * self._query_size * pairs
        return StepWork(read, 2 * products)


def _visible(
    extents: Sequence[tuple[int, int, list[int]]], window: int | None, block_size: int
) -> tuple[int, int]:
    """Return the number of KV slots that sequences see, and the sum over query tokens of the tokens that each
    one sees. `extents` has (start, query tokens, blocks) for each sequence. Slots of shared blocks count
    once; nodes of a tree count as a chain."""
    blocks: set[int] = set()
    unseen = pairs = 0
    for start, query_tokens, table in extents:
        end, first, within = start + query_tokens, 0, query_tokens
        if window is not None:
            first, within = max(0, start - window + 1), min(max(window - start, 0), query_tokens)
        # The last block is written, so it is not shared, and its unused slots can be subtracted exactly.
        blocks.update(table[first // block_size : -(-end // block_size)])
        unseen += first % block_size - end % -block_size
        pairs += within * start + within * (within + 1) // 2 + (query_tokens - within) * (window or 0)
    return len(blocks) * block_size - unseen, pairs
