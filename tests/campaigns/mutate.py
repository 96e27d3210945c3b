"""Hostile values, and small changes to valid data that make it hostile."""

import copy
from random import Random
from typing import Any

NUMBERS: tuple[int | float, ...] = (
    -1, 0, 1, -(2**31), 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, 5e-324, 1e-9,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS = (
    "", "a", "\0", "é", "\ud800", "\udc00\ud800", "\U0001f469\u200d\U0001f469" * 3, "\u202e\u0000\ufffd",
    "a" * 5000, "[" * 300, "null", "../../etc/passwd", "%s%n{}{{x}}", "\r\nX: y\r\n", " ", "-1",
    "<|im_end|>" * 50, "\\x00(?:a+)+$",
)  # fmt: skip
PACKABLE = tuple(n for n in NUMBERS if not isinstance(n, int) or -(2**63) <= n < 2**64)
"""Numbers that msgpack can carry."""


def value(rng: Random, depth: int = 2, numbers: tuple[int | float, ...] = NUMBERS) -> Any:
    """Return a random value of JSON's types, mostly close to the limits of allowed values."""
    match rng.randrange(9 if depth else 6):
        case 0 | 1:
            return rng.choice(numbers)
        case 2 | 3:
            return rng.choice(TEXTS)
        case 4:
            return rng.choice((None, True, False))
        case 5:
            return rng.randrange(-5, 400)
        case 6:
            return [value(rng, depth - 1, numbers) for _ in range(rng.choice((0, 1, 3, 40)))]
        case 7:
            return [rng.randrange(-2, 330)] * rng.choice((1, 100, 3000))
        case _:
            return {rng.choice(TEXTS)[:40]: value(rng, depth - 1, numbers) for _ in range(rng.randrange(4))}


def mutated(rng: Random, data: Any, numbers: tuple[int | float, ...] = NUMBERS) -> Any:
    """Return a copy of JSON-like data with one to three parts replaced, removed, repeated or added."""
    result = copy.deepcopy(data)
    for _ in range(rng.randint(1, 3)):
        container = _holder(rng, result)
        if container is None:
            return value(rng, 2, numbers)
        _change(rng, container, numbers)
    return result


def _holder(rng: Random, data: Any) -> Any:
    """Return a list or object somewhere in `data`, `data` itself if it contains no other; None if it is
    neither."""
    container = None
    while isinstance(data, dict | list):
        container = data
        parts = [part for part in _parts(data) if isinstance(part, dict | list)]
        if not parts or rng.random() < 0.5:
            break
        data = rng.choice(parts)
    return container


def _parts(data: Any) -> list[Any]:
    return list(data.values()) if isinstance(data, dict) else list(data)


def _change(rng: Random, container: Any, numbers: tuple[int | float, ...]) -> None:
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    kind = rng.randrange(6)
    if isinstance(container, dict) and (kind == 0 or not keys):
        container[rng.choice(("x", "", "type", rng.choice(TEXTS)[:40]))] = value(rng, 1, numbers)
    elif not keys or (kind == 1 and isinstance(container, list)):
        container.extend(value(rng, 1, numbers) for _ in range(rng.choice((1, 5, 200))))
    elif kind == 2:
        del container[rng.choice(keys)]
    elif kind == 3 and isinstance(container, list):
        container.extend(container[: rng.randint(1, 50)] * rng.randint(1, 20))
    else:
        container[rng.choice(keys)] = value(rng, 2, numbers)


def mutated_bytes(rng: Random, data: bytes) -> bytes:
    """Return the bytes with some of them changed, removed, repeated or inserted, or cut off."""
    changed_bytes = bytearray(data)
    for _ in range(rng.randint(1, 5)):
        position = rng.randrange(len(changed_bytes) + 1)
        match rng.randrange(5):
            case 0 | 1 if position < len(changed_bytes):
                changed_bytes[position] = rng.randrange(256)
            case 2:
                del changed_bytes[position : position + rng.randint(1, 20)]
            case 3:
                changed_bytes[position:position] = rng.randbytes(rng.randint(1, 20))
            case _ if rng.random() < 0.2:
                del changed_bytes[position:]
    return bytes(changed_bytes)
