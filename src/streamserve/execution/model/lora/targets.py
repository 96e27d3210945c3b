"""The modules that PEFT gives an adapter, by the fields `target_modules`, `exclude_modules` and
`layers_to_transform` of its configuration."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from streamserve.execution.model.fields import Fields, shown
from streamserve.execution.model.patterns import matching_steps

ALL_LINEAR = "all-linear"
"""Value of `target_modules` for every linear module except the output head."""

MAX_PATTERN_LENGTH = 1024
MAX_STEPS = 1_000_000
"""Limits that keep a pattern's matching fast: its length, and an upper bound of its steps for one name. A
pattern beyond them is not evaluated: the adapter's tensors then determine its modules."""

_LAYER = re.compile(r"model\.layers\.([0-9]+)\.")


@dataclass(frozen=True)
class Modules:
    """A set of modules: a module is in it if its name, or the end of its name from a dot on, is in `names`,
    or if `pattern` matches its whole name."""

    names: frozenset[str] = frozenset()
    pattern: re.Pattern[str] | None = None

    def __contains__(self, module: str) -> bool:
        parts = module.split(".")
        ends = (".".join(parts[first:]) for first in range(len(parts)))
        return any(end in self.names for end in ends) or bool(self.pattern and self.pattern.fullmatch(module))


@dataclass(frozen=True)
class Targets:
    """The modules that may have an adapter: modules in `included` (None: all) and not in `excluded`, in
    `layers` (None: all)."""

    included: Modules | None = None
    excluded: Modules = Modules()
    layers: Collection[int] | None = None

    def __contains__(self, module: str) -> bool:
        if self.included and module in self.included.names:  # by its whole name, whatever the layers
            return module not in self.excluded
        layer = _LAYER.match(module)
        in_layers = self.layers is None or (layer is not None and int(layer[1]) in self.layers)
        return (
            in_layers and module not in self.excluded and (self.included is None or module in self.included)
        )


def read_targets(fields: Fields) -> Targets:
    """Return the modules to which a configuration gives an adapter: all if `target_modules` is absent. A
    pattern that could take long to match counts as absent. Raises CheckpointError, which names the field that
    is wrong."""
    value = fields.get("target_modules")
    is_listed = value is not None and not (isinstance(value, str) and value.lower() == ALL_LINEAR)
    return Targets(
        included=_modules(fields, "target_modules") if is_listed else None,
        excluded=_modules(fields, "exclude_modules") or Modules(),
        layers=_layers(fields),
    )


def _modules(fields: Fields, field: str) -> Modules | None:
    """Return the modules in a field, which has a list of names or one regular expression; None for an
    expression that is not evaluated."""
    value = fields.get(field) or []
    if isinstance(value, str):
        pattern = _pattern(fields, field, value)
        return Modules(pattern=pattern) if pattern else None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        fields.refuse(field, f"must be a list of modules' names or a pattern, not {shown(value)}")
    return Modules(names=frozenset(value))


def _layers(fields: Fields) -> Collection[int] | None:
    """Return the numbers of the layers that have an adapter; None for all."""
    value = fields.get("layers_to_transform")
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(number) is int for number in numbers):
        fields.refuse("layers_to_transform", f"must be layers' numbers, not {shown(value)}")
    return frozenset(numbers) or None


def _pattern(fields: Fields, field: str, text: str) -> re.Pattern[str] | None:
    """Return the compiled pattern; None if it could take long to match."""
    if len(text) > MAX_PATTERN_LENGTH or matching_steps(text) > MAX_STEPS:
        return None
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        fields.refuse(field, f"has a pattern that is not a regular expression: {shown(text)}: {error}")
