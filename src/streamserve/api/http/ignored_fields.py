"""Request fields and query parameters that are not obeyed: some are refused, others are accepted with a
warning.

A warning appears in the reply's Warning header, in the debug log and in a metric. With strict_fields, all
such fields are refused.
"""

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamserve.protocol.errors import RequestError
from streamserve.protocol.field_errors import field_of

HEADER = "Warning"
OTHER = "other"
"""The metric's label for all unknown fields: their names are chosen by clients."""
MAX_NAMED = 16
"""Maximum number of fields of each kind that the header names."""

_STATE = "ignored_fields"
_MAX_NAME = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")

_log = logging.getLogger(__name__)

Values = Mapping[str, tuple[Any, ...]]
"""Fields with the values that have no effect; these values are accepted without a warning."""

Count = Callable[[str, str, int], None]
"""Called with a kind (unknown, without_effect, limited), a field's name and a number, to count fields."""


@dataclass(frozen=True, kw_only=True)
class OtherFields:
    """How to treat the fields that a route does not obey.

    - `refused`: fields that would change the result.
    - `without_effect`: fields that do not change the result on this server. They are accepted with a warning,
      as unknown fields are; if `strict`, they are refused, too.
    - `instead`: what to use in place of a field.
    """

    refused: Values = field(default_factory=dict)
    without_effect: Values = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False

    def hint(self, name: str) -> str:
        """Return the part of an error message that says what to use in place of the field `name`; an empty
        text if there is nothing."""
        return f" (use {self.instead[name]})" if name in self.instead else ""


STRICT = OtherFields(strict=True)
"""For routes that only this server has: all their fields are known."""

LENIENT = OtherFields()


class IgnoredFields:
    """The fields of one request that have no effect, or less than requested.

    If `strict`, such a field is an error. `counted_by` counts them if the request's model is not the default
    model.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.counted_by: Count | None = None
        self._without_effect: dict[str, str] = {}
        self._limited: dict[str, int] = {}
        self._unknown: dict[str, int] = {}
        self._meant: dict[str, str] = {}
        self._more_unknown = 0

    def __bool__(self) -> bool:
        return bool(self._without_effect or self._limited or self._unknown)

    def add(self, name: str, hint: str = "") -> None:
        """Add a known field. `hint` says which field to use instead. Raises RequestError if fields are
        strict."""
        if self.strict:
            raise RequestError(f"{name} has no effect{hint}", field=field_of(name))
        self._without_effect[name] = hint

    def limit(self, name: str, value: int, reason: str) -> None:
        """Add a field that is obeyed with the smaller `value`. `reason` says where this value comes from.
        Raises RequestError if fields are strict."""
        if self.strict:
            raise RequestError(f"{name} must be at most {value}, {reason}: lower it", field=field_of(name))
        self._limited[name] = min(value, self._limited.get(name, value))

    def add_unknown(self, name: str, known: Iterable[str] = (), what: str = "field") -> None:
        """Add an unknown field, or another unknown item named by `what`. The warning suggests a `known` field
        with a similar name. Raises RequestError if fields are strict."""
        if self.strict:
            meant = similar(name, known)
            hint = f": did you mean {meant}?" if meant else ""
            raise RequestError(f"{name} is not a known {what}{hint}", field=name)
        if name in self._unknown or len(self._unknown) < MAX_NAMED:
            if name not in self._unknown and (meant := similar(name, known)):
                self._meant[name] = meant
            self._unknown[name] = self._unknown.get(name, 0) + 1
        else:
            self._more_unknown += 1

    def text(self) -> str:
        """Return the warning, in printable ASCII without quotes."""
        known = [f"{_plain(name)}{hint}" for name, hint in list(self._without_effect.items())[:MAX_NAMED]]
        unknown = [
            _plain(name) + (f" (did you mean {self._meant[name]}?)" if name in self._meant else "")
            for name in self._unknown
        ]
        more = f" and {self._more_unknown} more" if self._more_unknown else ""
        parts = [f"without effect: {', '.join(known)}"] if known else []
        limited = [f"{_plain(name)} to {value}" for name, value in self._limited.items()]
        parts += [f"limited: {', '.join(limited)}"] if limited else []
        parts += [f"unknown: {', '.join(unknown)}{more}"] if unknown else []
        return "; ".join(parts)

    def count(self, count: Count) -> None:
        """Count the fields. Names of unknown fields are not used as labels: clients choose them."""
        for name in self._without_effect:
            count("without_effect", name, 1)
        for name in self._limited:
            count("limited", name, 1)
        unknown = sum(self._unknown.values()) + self._more_unknown
        if unknown:
            count("unknown", OTHER, unknown)


class FieldWarnings:
    """Middleware that gives each request its IgnoredFields, and its reply the Warning header."""

    def __init__(self, app: ASGIApp, strict: bool, count: Count) -> None:
        self._app = app
        self._strict = strict
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        ignored = IgnoredFields(self._strict)
        scope.setdefault("state", {})[_STATE] = ignored

        async def send_with_warning(message: Message) -> None:
            if message["type"] == "http.response.start" and ignored:
                text = ignored.text()
                MutableHeaders(scope=message)[HEADER] = f'299 streamserve "{text}"'
                _log.debug("fields %s", text)
                ignored.count(ignored.counted_by or self._count)
            await send(message)

        await self._app(scope, receive, send_with_warning)


def ignored_of(connection: HTTPConnection) -> IgnoredFields:
    """Return the ignored fields of a request, so that fields can be added."""
    ignored: IgnoredFields = connection.scope["state"][_STATE]
    return ignored


def check_parameters(request: Request, known: Sequence[str], strict: bool) -> None:
    """Treat query parameters that are not `known` as unknown fields: add them to the warning, or raise
    RequestError if they are `strict` on this route or on the server."""
    unknown = dict.fromkeys(name for name in request.query_params if name not in known)
    if unknown:
        ignored = IgnoredFields(strict=True) if strict else ignored_of(request)
        for name in unknown:
            ignored.add_unknown(name, known, "query parameter")


def similar(name: str, known: Iterable[str]) -> str | None:
    """Return the known field whose name is most similar to an unknown name, or None."""
    if len(name) > _MAX_NAME:
        return None
    return next(iter(difflib.get_close_matches(name.lower(), list(known), 1, 0.75)), None)


def _plain(name: str) -> str:
    """Return a name that is safe in a header: at most 64 letters, digits and _.-[]; other characters are
    replaced."""
    return _UNSAFE.sub("?", name[:_MAX_NAME])
