"""Validated access to the JSON files of a model folder: every error names the file and the field."""

import json
from pathlib import Path
from typing import Any, NoReturn

from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.numbers import plain

MAX_SIZE = 2**31 - 1
"""Maximum size in a field: kernels count in 32 bits."""

MAX_FILE_BYTES = 64 << 20
"""Maximum bytes of a JSON file: the index of a hundred thousand tensors has some ten million."""


class Fields:
    """An object in a JSON file, with validated access. `name` is its file, and its field if it is nested."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self.name = name
        self.values = values

    def refuse(self, field: str, reason: str) -> NoReturn:
        """Raise CheckpointError for `field`."""
        raise CheckpointError(f"{self.name}: {field} {reason}")

    def get(self, field: str, default: Any = None) -> Any:
        """Return the value of `field`; `default` if it is absent, None if it is null."""
        return self.values.get(field, default)

    def integer(self, field: str, default: int | None = None, maximum: int = MAX_SIZE) -> int:
        """Return a positive integer up to `maximum`; `default` if the field is absent or null. Raises
        CheckpointError if there is neither a value nor a default, or if the value is not such an integer."""
        value = self._present(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(field, f"must be a positive integer, not {shown(value)}")
        if value > maximum:
            self.refuse(field, f"must be at most {maximum}, not {shown(value)}")
        return value

    def number(
        self, field: str, default: float | None = None, minimum: float = 1e-30, maximum: float = 1e30
    ) -> float:
        """Return a number from `minimum` to `maximum`, which must be positive; `default` if the field is
        absent or null. Raises CheckpointError if there is neither a value nor a default, or if the value is
        not such a number."""
        value = self._present(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.refuse(field, f"must be a positive number, not {shown(value)}")
        if not minimum <= value <= maximum:
            self.refuse(field, f"must be from {plain(minimum)} to {plain(maximum)}, not {shown(value)}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        """Return a boolean; `default` if the field is absent or null."""
        value = self._present(field, default)
        if not isinstance(value, bool):
            self.refuse(field, f"must be true or false, not {shown(value)}")
        return value

    def nested(self, field: str) -> "Fields | None":
        """Return the object in `field`; None if it is absent, null or empty."""
        value = self.get(field) or None
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(field, f"must be an object, not {shown(value)}")
        return Fields(f"{self.name}: {field}", value)

    def _present(self, field: str, default: Any) -> Any:
        value = self.get(field)
        if value is None:
            value = default
        if value is None:
            self.refuse(field, "is missing")
        return value


def shown(value: object) -> str:
    """Return a value as text for messages. It is truncated: an integer may have thousands of digits."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def read_fields(path: Path) -> Fields:
    """Return the object in the JSON file at `path`. Raises CheckpointError if it cannot be read."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path}: has more than {MAX_FILE_BYTES} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise CheckpointError(f"{path}: is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return Fields(str(path), values)
