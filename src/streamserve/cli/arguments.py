"""The arguments of a command before they are parsed: flags that the command does not have."""

from collections import deque
from collections.abc import Mapping

from streamserve.settings.near_names import near_name
from streamserve.settings.options import SettingsError


def checked_flags(arguments: list[str], declared: Mapping[str, bool], command: str) -> list[str]:
    """Return the arguments of `command`, with dashes in the names of flags that were typed with underscores.

    `declared` says of each flag of the command whether it takes a value. Raises SettingsError for an unknown
    flag of two dashes, naming the flag that may be meant.
    """
    own, rest = list[str](), deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument == "--":
            return [*own, argument, *rest]
        flag, equals, value = argument.partition("=")
        dashed = flag.replace("_", "-")
        if flag.startswith("--") and dashed not in declared:
            raise SettingsError(unknown_flag(flag, declared, command))
        own.append(dashed + equals + value if dashed in declared else argument)
        if declared.get(dashed) and not equals and rest:
            own.append(rest.popleft())
    return own


def unknown_flag(flag: str, declared: Mapping[str, bool], command: str) -> str:
    """Return the error about an unknown flag."""
    near = near_name(flag, declared)
    way_on = f"did you mean {near}?" if near else f"`{command} --help` shows the flags"
    return f"there is no flag {flag}: {way_on}"
