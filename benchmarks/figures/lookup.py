"""Look up one number in a result file by a definition, and format it.

    FILE > STEP > … [over FILE > STEP > …] [as FORMAT]     the quotient, if `over` is given
    call NAME [as FORMAT]                                  a function of `tables/`

A step is a key, or conditions that select the first matching record of a list (`rate=2.5, setting=goodput`).
Steps begin in the file's `figures`, or at the top if the first one is a key there.

A format is an example of the digits, `0.00` or `0,0` with separated thousands, and perhaps a unit to convert
into: `%` of a share, `ms` or `µs` of seconds. With `range` before it, the smallest and the largest of several
numbers are shown; with `interval`, the bounds of a number that has them.
"""

import re
from collections.abc import Callable
from typing import Any

from .files import load

FACTORS = {"%": 100.0, "ms": 1e3, "µs": 1e6}
CALLS: dict[str, Callable[[], Any]] = {}
"""The functions that `call NAME` can name; the modules of `tables/` register them."""


def value(definition: str) -> str:
    """Return the formatted number of a definition.

    Raises:
        KeyError: the file or a step does not exist.
        ValueError: the definition cannot be read.
    """
    path, _, form = definition.partition(" as ")
    if path.startswith("call "):
        found = CALLS[path.removeprefix("call ").strip()]()
    else:
        above, _, below = path.partition(" over ")
        found = find(above)
        if below:
            found = found / find(below)
    return formatted(found, form.strip() or "text")


def find(path: str) -> Any:
    """Return the value at `FILE > STEP > …`."""
    name, *steps = (step.strip() for step in path.split(" > "))
    found: Any = load(name)
    if steps and steps[0] not in found:
        found = found["figures"]
    for step in steps:
        try:
            found = _step(found, step)
        except (KeyError, IndexError, StopIteration) as error:
            raise KeyError(f"{path}: there is no {step!r}") from error
    return found


def _step(found: Any, step: str) -> Any:
    if isinstance(found, dict):
        if step in found and f"{step}_interval" in found:
            return {
                "value": found[step],
                **dict(zip(("low", "high"), found[f"{step}_interval"], strict=True)),
            }
        return found[step]
    if "=" not in step:
        return found[int(step)]
    wanted = [condition.strip().split("=", 1) for condition in step.split(",")]
    return next(one for one in found if all(_same(one[key], said) for key, said in wanted))


def _same(value: Any, said: str) -> bool:
    return value == float(said) if isinstance(value, int | float) else str(value) == said


def formatted(found: Any, form: str) -> str:
    """Return a number, an interval, a range or a text in this format."""
    if form == "text":
        return str(found)
    match = re.fullmatch(r"(range |interval )?(0(?:,0)?(?:\.0+)?)(?: (%|ms|µs))?", form)
    if match is None:
        raise ValueError(f"not a format: {form!r}")
    kind, digits, unit = match.groups()
    places = len(digits.partition(".")[2])
    factor = FACTORS.get(unit, 1.0)

    def number(one: float) -> str:
        return f"{one * factor:{',' if ',' in digits else ''}.{places}f}"

    suffix = f" {unit}" if unit else ""
    if kind == "range ":
        low, high = number(min(found)), number(max(found))
        return (low if low == high else f"{low}–{high}") + suffix
    if isinstance(found, dict):
        bounds = f" ({number(found['low'])}–{number(found['high'])})" if kind else ""
        return number(found["value"]) + suffix + bounds
    return number(found) + suffix


def call(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function as `call NAME`."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        CALLS[name] = function
        return function

    return register
