"""The type of a habit: names that another program has for a setting, and what they mean here."""

import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Program = Literal["vllm", "sglang", "llama.cpp", "ollama"]
Kind = Literal["taken", "instead", "idle", "refused"]
"""What becomes of a habit:

- taken: it is a setting here. Its value is converted if the form differs.
- instead: it is refused, with the setting or value to use.
- idle: it is accepted with a warning, because nothing of it would change an output.
- refused: it is refused, with the reason.
"""

Values = Literal["none", "one", "optional", "several"]
"""The values that a flag takes from a command line. `optional`: on, off or auto may follow. `several`:
everything of the form NAME=VALUE or {…} that follows."""


@dataclass(frozen=True)
class Meaning:
    """What a value of a taken habit means: the `settings`, and the parts of the value that are `idle`, each
    with the reason."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    idle: tuple[str, ...] = ()


class Refusal(ValueError):
    """A value that cannot be converted. The message says what to use, in the form of `Habit.here`."""


Convert = Callable[[Any, ChainMap[str, Any]], Meaning]
"""Returns the meaning of a value. The second argument has all given values by their names: those of the same
source are its first map, then come the settings of sources of lower precedence. Raises Refusal."""


@dataclass(frozen=True)
class Habit:
    """One habit.

    - `names`: its names as they are typed in other programs: flags, or names of settings without dashes.
    - `here`: what it means here, in Markdown. `{setting}` and `{setting=value}` stand for a setting as it is
      written where the habit was used: `--setting value` or `setting = value`.
    - `convert`: for a taken habit.
    - `quiet`: values that change nothing here, and are accepted without a warning.
    - `refused`: values with which an idle habit is refused.
    """

    names: tuple[str, ...]
    programs: tuple[Program, ...]
    kind: Kind
    here: str
    convert: Convert | None = None
    quiet: tuple[Any, ...] = ()
    refused: tuple[Any, ...] = ()
    values: Values = "one"


_SETTING = re.compile(r"\{(\w+)(?:=([^}]*))?\}")


def spelled(text: str, as_flags: bool) -> str:
    """Return a text with its settings as flags, or as names."""

    def setting(match: re.Match[str]) -> str:
        name, value = match.groups()
        if as_flags:
            return f"`--{name.replace('_', '-')}{' ' + value if value else ''}`"
        return f"`{name} = {value}`" if value else f"`{name}`"

    return _SETTING.sub(setting, text)


def named_settings(text: str) -> list[str]:
    """Return the names of the settings in a text."""
    return [match[1] for match in _SETTING.finditer(text)]


def key_of(name: str) -> str:
    """Return the name of a habit as a keyword argument or in a file; an empty text for a short flag."""
    return name.removeprefix("--").replace("-", "_") if not re.match(r"-[^-]", name) else ""
