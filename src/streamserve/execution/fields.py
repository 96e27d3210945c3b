"""Reading JSON files of a model folder field by field, so that every refusal names the file and the field."""

import json
from pathlib import Path
from typing import Any, NoReturn

from streamserve.protocol.errors import CheckpointError


class Fields:
    """The object in a JSON file (or one nested in it), with checked access. `name` says where it is."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self.name = name
        self.values = values

    def refuse(self, field: str, reason: str) -> NoReturn:
        """Raise CheckpointError for `field`."""
        raise CheckpointError(f"{self.name}: {field} {reason}")

    def get(self, field: str, default: Any = None) -> Any:
        """The value of `field`; `default` if it is absent, None if it is null."""
        return self.values.get(field, default)

    def integer(self, field: str, default: int | None = None) -> int:
        """A positive integer; absent or null takes `default`, and is refused if that is None."""
        value = self._present(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(field, f"must be a positive integer, not {value!r}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A positive number; absent or null takes `default`, and is refused if that is None."""
        value = self._present(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.refuse(field, f"must be a positive number, not {value!r}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        """True or false; absent or null takes `default`."""
        value = self._present(field, default)
        if not isinstance(value, bool):
            self.refuse(field, f"must be true or false, not {value!r}")
        return value

    def nested(self, field: str) -> "Fields | None":
        """The object under `field`, or None if it is absent, null or empty."""
        value = self.get(field) or None
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(field, f"must be an object, not {value!r}")
        return Fields(f"{self.name}: {field}", value)

    def _present(self, field: str, default: Any) -> Any:
        value = self.get(field)
        if value is None:
            value = default
        if value is None:
            self.refuse(field, "is missing")
        return value


def read_fields(path: Path) -> Fields:
    """The object in the JSON file at `path`. Raises CheckpointError if there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return Fields(str(path), values)
