"""Request bodies: read within limits and parsed strictly. Each error names the field.

The memory of a decoded body is computed before decoding (json_scan.py), and charged (memory.py).
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta
from starlette.requests import Request

from streamserve.api.http.ignored_fields import STRICT, IgnoredFields, OtherFields, ignored_of
from streamserve.api.http.json_scan import JsonScan
from streamserve.api.http.limits import charge_of
from streamserve.api.http.memory import Charge
from streamserve.api.http.side_thread import SideThread
from streamserve.protocol.errors import RequestError
from streamserve.protocol.field_errors import Mismatch, mismatch_of

LARGEST = "largest"
"""The key of a field's `Meta.extra` for the value that all larger integers count as. Without it, an integer
beyond 64 bits is an error."""

_LARGE_BYTES = 64 << 10
_LARGE_VALUES = 4096
"""Bodies with more JSON values than this are decoded in the side thread."""

T = TypeVar("T", bound=msgspec.Struct)


class BodyLimits(Protocol):
    """The limits of request bodies, and the thread that decodes large ones."""

    @property
    def max_body_bytes(self) -> int: ...

    @property
    def max_values(self) -> int: ...

    @property
    def max_characters(self) -> int: ...

    @property
    def side_thread(self) -> SideThread: ...


async def read_request(
    request: Request, limits: BodyLimits, kind: type[T], others: OtherFields = STRICT
) -> T:
    """Read the body of `request` as `kind`.

    `others` says how to treat fields that `kind` does not have. Raises RequestError if the body is larger
    than a limit or is not a JSON object, if a field is refused or has a wrong type (the error names the first
    one), or with status 429 if there is no memory for it.
    """
    ignored = IgnoredFields(strict=True) if others.strict else ignored_of(request)
    charge = charge_of(request)
    scan = JsonScan(limits.max_values, limits.max_characters)
    data = await _read(request, limits.max_body_bytes, charge, scan)
    size = len(data)
    charge.add(scan.decoded_bytes)
    large = size > _LARGE_BYTES or scan.values > _LARGE_VALUES
    body = await limits.side_thread.run_if(large, lambda: checked(parse(data), kind, others, ignored))
    charge.release(size)
    return body


async def read_message(
    data: bytes, limits: BodyLimits, charge: Charge, kind: type[T], others: OtherFields = STRICT
) -> T:
    """Parse a WebSocket message as `kind`, strictly. Raises RequestError as `read_request` does."""
    scan = JsonScan(limits.max_values, limits.max_characters)

    def decoded() -> T:
        scan.feed(data)
        charge.add(scan.decoded_bytes)
        return checked(parse(data), kind, others)

    return await limits.side_thread.run_if(len(data) > _LARGE_BYTES, decoded)


async def _read(request: Request, limit: int, charge: Charge, scan: JsonScan) -> bytearray:
    too_large = RequestError(
        f"the request is larger than {limit} bytes, which is the limit (max_body_bytes)", status=413
    )
    if int(request.headers.get("content-length", 0)) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        charge.add(len(chunk))
        body += chunk
        if len(body) > limit:
            raise too_large
        scan.feed(chunk)
    return body


def parse(body: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object from text that passed JsonScan. Raises RequestError if it is not a JSON object."""
    try:
        content = msgspec.json.decode(body)
    except RecursionError as error:
        raise RequestError("the request is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the request is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise RequestError("the request must be a JSON object")
    return content


def checked(
    content: Mapping[str, Any],
    kind: type[T],
    others: OtherFields = STRICT,
    ignored: IgnoredFields | None = None,
) -> T:
    """Convert `content` to `kind`. A field that is null counts as left out, and 5.0 as 5. Without `ignored`,
    fields are strict.

    Raises RequestError as `read_request` does.
    """
    known = kind.__struct_fields__
    integers = _integer_fields(kind)
    content = {
        name: int(value) if name in integers and isinstance(value, float) and value.is_integer() else value
        for name, value in content.items()
    }
    for name, largest in _largest_values(kind).items():
        if isinstance(content.get(name), int):
            content[name] = min(content[name], largest)
    ignored = IgnoredFields(strict=True) if ignored is None else ignored
    for name, value in content.items():
        if name not in known:
            _check_other(name, value, others, ignored, known)
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise RequestError(f"{name} is out of range", field=name)
    fields = {name: value for name, value in content.items() if value is not None and name in known}
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _refused(mismatch_of(error), kind) from error


@cache
def _integer_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Return the fields of `kind` that are integers, and no other numbers."""
    types = {name: {hint, *get_args(hint)} for name, hint in get_type_hints(kind).items()}
    return frozenset(name for name, hints in types.items() if int in hints and float not in hints)


@cache
def _largest_values(kind: type[msgspec.Struct]) -> Mapping[str, int]:
    """Return the fields of `kind` whose large integers count as a smaller value, and this value."""
    hints = get_type_hints(kind, include_extras=True).items()
    metas = [(name, meta) for name, hint in hints for meta in get_args(hint)[1:] if isinstance(meta, Meta)]
    return {name: meta.extra[LARGEST] for name, meta in metas if meta.extra}


def _refused(mismatch: Mismatch, kind: type[msgspec.Struct]) -> RequestError:
    """Return the error about a field that msgspec cannot convert: "Expected `int`, got `str` - at `$.n`"
    becomes "n: expected `int`, got `str`"."""
    if mismatch.missing:
        return RequestError(f"{mismatch.field} is required", field=mismatch.field)
    if not mismatch.path:
        return RequestError(mismatch.text, field=mismatch.field)
    reason = f"{mismatch.reason[:1].lower()}{mismatch.reason[1:]}"
    choices = get_args(get_type_hints(kind).get(mismatch.path))
    texts = [choice for choice in choices if isinstance(choice, str)]
    if texts and mismatch.reason.startswith("Invalid enum value "):
        reason = f"must be one of {', '.join(texts)}"
    return RequestError(f"{mismatch.path}: {reason}", field=mismatch.field)


def _check_other(
    name: str, value: Any, others: OtherFields, ignored: IgnoredFields, known: tuple[str, ...]
) -> None:
    """Refuse a field that would change the result. Add a field without effect to `ignored`."""
    values = others.refused.get(name)
    if values is None and ignored.strict:
        values = others.without_effect.get(name)
    if values is not None:
        if not _has_no_effect(value, values):
            hint = others.hint(name) or _accepted_values(values)
            raise RequestError(f"{name} is not supported{hint}", field=name)
    elif name not in others.without_effect:
        ignored.add_unknown(name, known)
    elif not _has_no_effect(value, others.without_effect[name]):
        ignored.add(name, others.hint(name))


def _has_no_effect(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Return whether `value` is null or one of the `accepted` values. JSON's true is not equal to 1."""
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in accepted
    )


def _accepted_values(accepted: tuple[Any, ...]) -> str:
    """Return the part of an error message that lists the accepted values of an unsupported field."""
    values = " or ".join(msgspec.json.encode(value).decode() for value in accepted)
    return f": leave it out, or set it to {values}" if values else ": leave it out"
