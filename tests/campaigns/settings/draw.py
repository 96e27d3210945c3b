"""Random values for all declared settings; a new setting is drawn as soon as it is declared.

A generator is made from a field's type and bounds. Settings that need more than a type (names, paths,
dependencies) are in a table (special.py). A setting without a generator is an error.
"""

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

from streamserve.protocol.config import ModelConfig
from streamserve.settings.server_config import ServerConfig

Draw = Callable[[Random], Any]

SHARE = 0.22
"""Probability that a setting is given and not left at its default."""
ABSURD_SHARE = 0.02
SOFT_LIMIT = 4096
"""Upper limit for numbers without a declared bound; sometimes an absurd number is drawn."""
ABSURD = (2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1)


class NoGenerator(Exception):
    """A declared setting that cannot be drawn: give it one in special.py."""


def generators(
    special: Mapping[str, Draw], structs: Iterable[type[msgspec.Struct]] = (ModelConfig, ServerConfig)
) -> dict[str, Draw]:
    """Return a generator for every declared setting but the model's path. Raises NoGenerator naming settings
    that have no generator, and names in `special` that are not settings."""
    fields = {field.name: field for struct in structs for field in msgspec.structs.fields(struct)}
    del fields["path"]
    by_name = {name: special.get(name) or from_type(field.type) for name, field in fields.items()}
    missing = [name for name, draw in by_name.items() if draw is None] + sorted(
        special.keys() - fields.keys()
    )
    if missing:
        raise NoGenerator(f"no generator, or no such setting: {', '.join(missing)}")
    return {name: draw for name, draw in by_name.items() if draw is not None}


def from_type(declared: Any) -> Draw | None:
    """Return a generator of values that a declaration allows; None if the type alone does not define useful
    values."""
    info = inspect.type_info(declared)
    if isinstance(info, inspect.Metadata):
        info = info.type
    parts = list(info.types) if isinstance(info, inspect.UnionType) else [info]
    (value,) = (part for part in parts if not isinstance(part, inspect.NoneType))
    match value:
        case inspect.BoolType():
            return lambda rng: rng.random() < 0.5
        case inspect.LiteralType():
            return lambda rng: rng.choice(value.values)
        case inspect.IntType():
            low = value.ge if value.ge is not None else (value.gt or 0) + 1
            high = value.le if value.le is not None else None if value.lt is None else value.lt - 1
            return whole_numbers(low, high)
        case inspect.FloatType():
            low_float = value.ge if value.ge is not None else value.gt or 0.0
            return real_numbers(float(low_float), value.le if value.le is not None else value.lt)
    return None


def whole_numbers(low: int, high: int | None) -> Draw:
    """Return a generator of integers between two bounds: often the bounds, otherwise each order of magnitude
    is equally likely."""
    top = min(SOFT_LIMIT, high) if high is not None else max(SOFT_LIMIT, 64 * low)

    def draw(rng: Random) -> int:
        chance = rng.random()
        if chance < ABSURD_SHARE and high is None:
            return rng.choice(ABSURD)
        if chance < 0.12:
            return low
        if chance < 0.2:
            return min(low + 1, top)
        if chance < 0.25:
            return top
        return low - 1 + round((top - low + 1) ** rng.random())

    return draw


def real_numbers(low: float, high: float | None) -> Draw:
    """Return a generator of floats between two bounds (the default upper bound is 100). Each order of
    magnitude is equally likely."""

    def draw(rng: Random) -> float:
        if high is not None:
            return rng.choice((low, high, rng.uniform(low, high), rng.uniform(low, high)))
        return low + 10.0 ** rng.uniform(-2, 2)

    return draw


def draw_settings(rng: Random, table: Mapping[str, Draw], always: Iterable[str] = ()) -> dict[str, Any]:
    """Draw settings: each of the table with probability SHARE, and those in `always` in every case. A setting
    whose generator returns None is omitted."""
    chosen = {name: draw(rng) for name, draw in table.items() if rng.random() < SHARE or name in set(always)}
    return {name: value for name, value in chosen.items() if value is not None}
