"""The arguments of a command before they are parsed: flags of other programs, and unknown flags."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamserve.settings.habits.habit import Values
from streamserve.settings.habits.table import habits_by_name
from streamserve.settings.near_names import near_name
from streamserve.settings.options import SettingsError

_OF_SETTINGS = "--speculation-policy"
"""A flag of every command that has the settings of a model or server, and of no other command."""

_SWITCHES = ("on", "off", "auto", "true", "false", "0", "1")


@dataclass(frozen=True)
class Arguments:
    """The arguments of a command: its `own`, and the values of flags of other programs by the flags as they
    were typed."""

    own: list[str] = field(default_factory=list)
    foreign: dict[str, Any] = field(default_factory=dict)


def separate(arguments: list[str], declared: Mapping[str, bool], command: str) -> Arguments:
    """Separate the arguments of `command` from flags of other programs. `declared` says of each flag of the
    command whether it takes a value. Only commands with settings take other flags.

    A flag of the command may be typed with underscores in place of dashes. Raises SettingsError for an
    unknown flag of two dashes, naming the flag that may be meant.
    """
    habits = {name: habit.values for name, habit in habits_by_name().items() if name.startswith("-")}
    foreign_flags = habits if _OF_SETTINGS in declared else {}
    separated, rest = Arguments(), deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument == "--":
            separated.own.extend([argument, *rest])
            break
        flag, equals, value = argument.partition("=")
        dashed = flag.replace("_", "-")
        if dashed in declared or not flag.startswith("-"):
            separated.own.append(dashed + equals + value if dashed in declared else argument)
            if declared.get(dashed) and not equals and rest:
                separated.own.append(rest.popleft())
        elif (positive := _positive(dashed, foreign_flags)) is not None:
            given = value if equals else None
            taken = _value(dashed, given, rest, foreign_flags[positive], on=positive == dashed)
            _add(separated.foreign, positive, taken)
        elif flag.startswith("--"):
            raise SettingsError(_unknown(flag, [*declared, *foreign_flags], command))
        else:
            separated.own.append(argument)
    return separated


def _positive(flag: str, habits: Mapping[str, Values]) -> str | None:
    """Return the flag of another program, without the `no` of a switch that is turned off; None if it is no
    such flag."""
    if flag in habits:
        return flag
    positive = f"--{flag.removeprefix('--no-')}"
    return positive if flag.startswith("--no-") and habits.get(positive) == "none" else None


def _value(flag: str, given: str | None, rest: deque[str], values: Values, on: bool) -> Any:
    """Return the value of a flag, and remove what it takes from `rest`. Raises SettingsError if it is
    missing."""
    if values == "none" or given is not None:
        return on if given is None else [given] if values == "several" else given
    if values == "optional":
        return rest.popleft() if rest and rest[0] in _SWITCHES else True
    taken: list[str] = []
    while values == "several" and rest and not rest[0].startswith("-") and _is_pair(rest[0]):
        taken.append(rest.popleft())
    if values == "one" and rest:
        return rest.popleft()
    if not taken:
        raise SettingsError(f"{flag}: it needs a value")
    return taken


def _is_pair(argument: str) -> bool:
    return "=" in argument or argument.startswith("{")


def _add(foreign: dict[str, Any], flag: str, value: Any) -> None:
    """Store a value; values of a flag with several values are collected."""
    before = foreign.get(flag)
    foreign[flag] = [*before, *value] if isinstance(before, list) and isinstance(value, list) else value


def _unknown(flag: str, flags: list[str], command: str) -> str:
    """Return the error about an unknown flag."""
    near = near_name(flag, flags)
    way_on = f"did you mean {near}?" if near else f"`{command} --help` shows the flags"
    return f"there is no flag {flag}: {way_on}"
