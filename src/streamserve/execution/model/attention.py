"""The interface of attention over the paged KV cache, which each backend implements."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from streamserve.execution.model.layout import Layout


@dataclass(frozen=True)
class Scoring:
    """The scores of attention before the softmax: products of query and key, multiplied by `scale` (None:
    head_dim^-1/2) and, with a `cap` other than 0, bounded as cap · tanh(score / cap)."""

    scale: float | None = None
    cap: float = 0.0


PLAIN = Scoring()


class AttentionBackend(Protocol):
    """Computes attention of a step's rows over their sequences' KV caches. `row_invariant`: a row's bits
    never depend on other rows, on the division of its sequence into chunks, or on the number of threads."""

    row_invariant: bool

    def plan(self, layout: Layout) -> None:
        """Prepare a step: compute everything that all layers share."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Write `k`, `v` [rows, kv head, dim] to the rows' slots, then return the attention of `q` [rows,
        head, dim] over every visible slot: [rows, head, dim].

        Visible are the committed slots up to the row's own, and its ancestors in a tree, within the layer's
        window. All keys and values are read as the cache stores them, also the rows' own. `sinks` [head]
        (float32) take part in each softmax like the score of a further key that has no value.
        """
