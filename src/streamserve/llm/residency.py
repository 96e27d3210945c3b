"""The choice of models to unload in favour of another one: a pure function of plain data."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Idle:
    """A loaded model that no request uses: its size in bytes, and when its last request ended."""

    name: str
    size: int
    last_used: float


def to_unload(needed: int, idle: Iterable[Idle]) -> list[Idle] | None:
    """Return the models to unload so that at least `needed` bytes become free; None if all of them are not
    enough.

    The least recently used models are chosen, except those that the other chosen ones make unnecessary.
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
