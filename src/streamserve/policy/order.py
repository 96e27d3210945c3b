"""Who goes first: orders of live sequences, some of whose prompts may still be arriving (Stream2LLM)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Order = Literal["arrival", "fcfs", "lcas", "mcps"]
ORDERS: tuple[Order, ...] = get_args(Order)

PATIENCE = 10.0
"""Seconds after its last chunk from which on `lcas` lets a complete prompt go before fresher ones."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence as far as an order looks at it. `complete`: its prompt has come to its end. `chunk_at`: when
    the latest part of its prompt came. `computed`: tokens that have KV. Smaller priorities go first."""

    id: int
    priority: int
    arrival: float
    complete: bool = True
    chunk_at: float = 0.0
    computed: int = 0


def rank(order: Order, candidates: Sequence[Candidate], now: float) -> list[int]:
    """The candidates' ids, first to last; within a priority:

    arrival  as they came: streaming without a policy
    fcfs     complete prompts before partial ones, then as they came
    lcas     latest chunk arrival first; complete prompts that have waited for `PATIENCE` before all, so that
             a stream of fresh ones starves nobody
    mcps     most computed first
    """

    def key(one: Candidate) -> tuple[float, ...]:
        match order:
            case "arrival":
                return (one.priority, one.arrival, one.id)
            case "fcfs":
                return (one.priority, not one.complete, one.arrival, one.id)
            case "lcas":
                aged = one.complete and now - one.chunk_at >= PATIENCE
                return (one.priority, not aged, one.chunk_at if aged else -one.chunk_at, one.id)
            case "mcps":
                return (one.priority, -one.computed, one.arrival, one.id)

    return [one.id for one in sorted(candidates, key=key)]
