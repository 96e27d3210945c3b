"""Formats of errors: OpenAI's, except on the paths of an API that has a different one."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from streamserve.protocol.errors import RequestError

_FORMAT = "error_format"


@dataclass(frozen=True)
class ErrorFormat:
    """How the API at `path` and below reports errors.

    - `encode`: returns the body of an error, given the id of its request.
    - `statuses`: the API's statuses instead of this server's.
    - `id_header`: the name of a further header, in every reply, that holds the request's id.
    """

    path: str
    encode: Callable[[RequestError, str], bytes]
    statuses: Mapping[int, int]
    id_header: str

    def covers(self, path: str) -> bool:
        """Return whether `path` belongs to the API."""
        return path == self.path or path.startswith(f"{self.path}/")

    def status(self, status: int) -> int:
        """Return the API's status for an error's status."""
        return self.statuses.get(status, status)


def choose_format(scope: Scope, formats: Iterable[ErrorFormat]) -> ErrorFormat | None:
    """Return the error format for the path of `scope`, and store it in `scope`; None: OpenAI's format."""
    chosen = next((format for format in formats if format.covers(scope["path"])), None)
    scope.setdefault("state", {})[_FORMAT] = chosen
    return chosen


def format_of(scope: Scope) -> ErrorFormat | None:
    """Return the format that `choose_format` chose for a request; None: OpenAI's."""
    state: Mapping[str, Any] = scope.get("state", {})
    return state.get(_FORMAT)
