"""Validated access to the metadata of a GGUF file: every error names the file and the entry."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.numbers import plain

MAX_SIZE = 2**31 - 1
"""Maximum size of a dimension: kernels count in 32 bits."""


class Metadata:
    """The entries of the file at `path`, with validated access."""

    def __init__(self, path: Path, entries: Mapping[str, Any]) -> None:
        self.path = path
        self.entries = entries

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raise CheckpointError for the entry `key`."""
        raise CheckpointError(f"{self.path}: {key} {reason}")

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """Return an integer from `minimum` to `maximum`, or `default` where the entry is missing. Raises
        CheckpointError if there is neither an entry nor a default, or if the value is not such an integer."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.refuse(key, f"must be an integer from {minimum} to {maximum}, not {shown(value)}")
        return value

    def number(
        self, key: str, default: float | None = None, minimum: float = 1e-30, maximum: float = 1e30
    ) -> float:
        """Return a number from `minimum` to `maximum`, or `default` where the entry is missing. Raises
        CheckpointError if there is neither an entry nor a default, or if the value is not such a number."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            self.refuse(
                key, f"must be a number from {plain(minimum)} to {plain(maximum)}, not {shown(value)}"
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean, or `default` where the entry is missing."""
        value = self._present(key, default)
        if not isinstance(value, bool):
            self.refuse(key, f"must be true or false, not {shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string, or `default` where the entry is missing. Raises CheckpointError if there is
        neither an entry nor a default, or if the value is not a string."""
        value = self._present(key, default)
        if not isinstance(value, str):
            self.refuse(key, f"must be a string, not {shown(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        """Return an array of strings."""
        value = self._present(key, None)
        if not isinstance(value, list):
            self.refuse(key, f"must be an array of strings, not {shown(value)}")
        return value

    def numbers(self, key: str, count: int) -> NDArray[Any]:
        """Return an array of `count` finite numbers."""
        value = self._present(key, None)
        if not isinstance(value, np.ndarray) or len(value) != count or not np.isfinite(value).all():
            self.refuse(key, f"must be an array of {count} finite numbers, not {shown(value)}")
        return value

    def _present(self, key: str, default: Any) -> Any:
        value = self.entries.get(key, default)
        if value is None:
            self.refuse(key, "is missing")
        return value


def shown(value: object) -> str:
    """Return a value as one line for messages; long values are truncated."""
    if isinstance(value, list | np.ndarray):
        return f"an array of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
