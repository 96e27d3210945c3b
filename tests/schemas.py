"""Random JSON schemas that only allow short answers. They have no unbounded numbers, whose decimals might
never end."""

import random
from typing import Any

LETTERS = "abcxyz"


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema with at most `depth` levels of arrays and objects, sometimes with references."""
    schema = _object(rng, depth, refer=True)
    schema["$defs"] = {"part": _any(rng, 1, refer=False), "leaf": _leaf(rng)}
    return schema


def _any(rng: random.Random, depth: int, refer: bool) -> dict[str, Any]:
    kind = rng.random()
    if refer and kind < 0.15:
        return {"$ref": f"#/$defs/{rng.choice(('part', 'leaf'))}"}
    if depth and kind < 0.35:
        return _object(rng, depth - 1, refer)
    if depth and kind < 0.5:
        minimum = rng.randint(0, 2)
        items = _any(rng, depth - 1, refer)
        return {"type": "array", "items": items, "minItems": minimum, "maxItems": minimum + rng.randint(0, 2)}
    if depth and kind < 0.6:
        return {"anyOf": [_any(rng, depth - 1, refer) for _ in range(rng.randint(1, 3))]}
    return _leaf(rng)


def _object(rng: random.Random, depth: int, refer: bool) -> dict[str, Any]:
    names = rng.sample(["name", "size", "a b", "ü", 'quo"te', "x" * 12], rng.randint(0, 4))
    required = [name for name in names if rng.random() < 0.6]
    properties = {name: _any(rng, depth, refer) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    shortest = rng.randint(0, 3)
    return rng.choice(
        [
            {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 5)},
            {"type": "string", "pattern": f"^[{rng.choice(LETTERS)}0-9]{{1,4}}$"},
            {"type": "string", "format": rng.choice(("date", "uuid", "ipv4"))},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)},
            {"type": rng.choice(("boolean", "null"))},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
            {"enum": rng.sample(["one", "two", 3, None, True, "é", [1, 2], {"k": "v"}], rng.randint(1, 4))},
            {"const": rng.choice(["fixed", 7, False, {"deep": [1]}])},
        ]
    )
