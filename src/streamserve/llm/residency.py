"""Which models to unload for another one: a decision on plain data."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Idle:
    """A loaded model that no request uses: its bytes, and when the last one ended."""

    name: str
    size: int
    last_used: float


def to_unload(needed: int, idle: Iterable[Idle]) -> list[Idle] | None:
    """Return the models to unload so that at least `needed` bytes become free; None if all are not enough.

    They are the least recently used ones, without those that the others make unnecessary.
    """
    chosen: list[Idle] = []
    freed = 0
    for model in sorted(idle, key=lambda each: each.last_used):
        if freed >= needed:
            break
        chosen.append(model)
        freed += model.size
    if freed < needed:
        return None
    for model in sorted(chosen, key=lambda each: -each.last_used):
        if freed - model.size >= needed:
            chosen.remove(model)
            freed -= model.size
    return chosen
