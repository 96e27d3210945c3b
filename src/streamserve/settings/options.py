"""Derive options from the declared fields of structs, and convert given values to these structs. This module
imports little, because every run of the command line needs the options."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect

from streamserve.protocol.config import ModelConfig
from streamserve.protocol.field_errors import mismatch_of
from streamserve.protocol.numbers import plain
from streamserve.settings.server_config import ServerConfig

S = TypeVar("S", bound=msgspec.Struct)

SECRETS = ("api_key", "admin_key", "metrics_key")
"""Settings that are keys: only their digests are stored, so that they cannot be printed or logged."""


class SettingsError(ValueError):
    """An unknown setting or invalid value; the message names the setting and its source."""


@dataclass(frozen=True)
class Option:
    """One setting. `kind` is bool, int, float, str or list. `default` is the field's default. `choices` are
    the only allowed values; empty: any."""

    name: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """All settings of a server: the model's name as given, where and how to load the model, and how to serve
    it."""

    name: str
    model: ModelConfig
    server: ServerConfig


def options(*structs: type[msgspec.Struct]) -> list[Option]:
    """Return every setting of `structs` except the model's path. By default, `structs` are ModelConfig and
    ServerConfig: the settings of a server."""
    return [option for struct in structs or (ModelConfig, ServerConfig) for option in _options_of(struct)]


@cache
def _options_of(struct: type[msgspec.Struct]) -> tuple[Option, ...]:
    return tuple(_option(field) for field in msgspec.structs.fields(struct) if field.name != "path")


def _option(field: msgspec.structs.FieldInfo) -> Option:
    kind: type = str
    description, choices = "", tuple[str, ...]()
    info = inspect.type_info(field.type)
    if isinstance(info, inspect.Metadata):
        description = (info.extra_json_schema or {}).get("description", "")
        info = info.type
    for part in info.types if isinstance(info, inspect.UnionType) else (info,):
        if isinstance(part, inspect.BoolType):
            kind = bool
        elif isinstance(part, inspect.IntType):
            kind = int
        elif isinstance(part, inspect.FloatType):
            kind = float
        elif isinstance(part, inspect.VarTupleType):
            kind = list
        elif isinstance(part, inspect.LiteralType):
            choices = tuple(map(str, part.values))
            description += f" ({', '.join(choices)})"
    if is_size(field.name):
        kind, description = str, f"{description} (also 512MB, 2GiB)"
    if field.name in DURATIONS:
        kind, description = str, f"{description} (also 90s, 10m, 2h)"
    return Option(field.name, kind, field.default, description, choices)


_UNITS = {"": 1, **{f"{sign}B": 1000**power for power, sign in enumerate(("k", "M", "G", "T"), start=1)}}
_UNITS |= {f"{sign}iB": 1024**power for power, sign in enumerate(("K", "M", "G", "T"), start=1)}
_UNITS |= {"B": 1, "KB": 1000}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?([A-Za-z]{0,3})")


def is_size(name: str) -> bool:
    """Return whether a setting is a size in bytes, which may be given with a unit."""
    return name.endswith("_bytes")


def size_in_bytes(text: str) -> int:
    """Return a size such as 512, 2GB or 1.5GiB in bytes. Raises ValueError if the text is not a size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise ValueError("must be a number of bytes, or one with a unit: kB, MB, GB, TB, KiB, MiB, GiB, TiB")
    size = Fraction(match[1]) * _UNITS[match[2]]
    if size.denominator != 1:
        raise ValueError(f"is not a whole number of bytes: {float(size):g}")
    return int(size)


DURATIONS = ("idle_unload", "load_timeout", "memory_timeout")
"""Settings in seconds that may be given with a unit."""

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?([smhd]?)")


def duration_in_seconds(text: str) -> float:
    """Return a duration such as 90, 90s, 10m or 1.5h in seconds. Raises ValueError if the text is not a
    duration."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError("must be a number of seconds, or one with a unit: s, m, h, d")
    return float(Fraction(match[1]) * _SECONDS[match[2]])


MAX_NUMBER = 2**63 - 1
"""Largest absolute value of a number: messages to workers have 64 bits for it."""


def _check_numbers(values: Mapping[str, Any]) -> None:
    """Raise SettingsError for a number that is not finite, or does not fit in 64 bits."""
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingsError(f"{name} = {value}: must be a finite number")
        if isinstance(value, int | float) and not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise SettingsError(f"{name} = {value!r:.40}: must be between {-MAX_NUMBER} and {MAX_NUMBER}")


def _with_units(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with sizes and durations as numbers, in bytes and seconds. Raises SettingsError for a
    text that is neither."""
    converted = dict(values)
    for name, value in values.items():
        if isinstance(value, str) and (is_size(name) or name in DURATIONS):
            try:
                converted[name] = size_in_bytes(value) if is_size(name) else duration_in_seconds(value)
            except ValueError as error:
                raise SettingsError(f"{name} = {value!r}: {error}") from error
    return converted


def convert(values: Mapping[str, Any], struct: type[S]) -> S:
    """Convert the values that are fields of `struct`. Raises SettingsError for an invalid value."""
    known = {field.name for field in msgspec.structs.fields(struct)}
    values = _with_units(values)
    try:
        _check_numbers(values)
        return msgspec.convert({k: v for k, v in values.items() if k in known}, struct, strict=False)
    except msgspec.ValidationError as error:
        mismatch = mismatch_of(error)
        name = mismatch.path or "settings"
        allowed = _allowed(struct, name)
        reason = f"must be one of {', '.join(allowed)}" if allowed else _in_words(mismatch.reason)
        raise SettingsError(f"{name} = {values.get(name)!r}: {reason}") from error


_EXPECTED = re.compile(r"Expected `(\w+)(?: \| null)?`(?: (>=|<=|>|<) ([\d.]+))?(?:, got .*)?")
_KINDS = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "array": "a list",
}  # fmt: skip
_BOUNDS = {">=": " of at least {}", "<=": " of at most {}", ">": " above {}", "<": " below {}"}


def _in_words(reason: str) -> str:
    """Return msgspec's "Expected `int` >= 1" as "must be a whole number of at least 1"."""
    match = _EXPECTED.fullmatch(reason)
    if match is None or match[1] not in _KINDS:
        return reason
    bound = _BOUNDS[match[2]].format(plain(float(match[3]))) if match[2] else ""
    return f"must be {_KINDS[match[1]]}{bound}"


def _allowed(struct: type[msgspec.Struct], name: str) -> list[str]:
    """Return the allowed values of a field with a Literal type."""
    hint = get_type_hints(struct).get(name)
    return [str(value) for value in get_args(hint)] if get_origin(hint) is Literal else []
