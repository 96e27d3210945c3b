"""Request bodies: read within limits and parsed strictly; each error names the field.

The memory that a decoded body takes is known before decoding (json_scan.py), and charged (memory.py).
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from streamserve.api.generation import AppContext
from streamserve.api.http.json_scan import JsonScan
from streamserve.api.http.limits import charge_of
from streamserve.api.http.memory import Charge
from streamserve.protocol.errors import RequestError

_LARGE_BYTES = 64 << 10
_LARGE_VALUES = 4096
"""Larger bodies are decoded outside of the event loop."""

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")

T = TypeVar("T", bound=msgspec.Struct)


async def read_request(
    request: Request, door: AppContext, kind: type[T], unsupported: Mapping[str, tuple[Any, ...]]
) -> T:
    """Read the body of `request` as `kind`.

    `unsupported` are fields that are known but not supported, with the values that have no effect and are
    accepted. Raises RequestError if the body is larger than a limit or is not a JSON object, or naming the
    first field that is unknown, unsupported or of the wrong type; 429 if there is no memory for it.
    """
    charge = charge_of(request)
    scan = JsonScan(door.max_values, door.max_characters)
    body = await _read(request, door.settings.max_body_bytes, charge, scan)
    size = len(body)
    charge.add(scan.decoded_bytes)
    large = size > _LARGE_BYTES or scan.values > _LARGE_VALUES
    wanted = await door.side.run_if(large, lambda: checked(parse(body), kind, unsupported))
    charge.give(size)
    return wanted


async def read_message(
    data: bytes, door: AppContext, charge: Charge, kind: type[T], unsupported: Mapping[str, tuple[Any, ...]]
) -> T:
    """Parse a WebSocket message as `kind`. Raises RequestError as `read_request` does."""
    scan = JsonScan(door.max_values, door.max_characters)

    def decoded() -> T:
        scan.feed(data)
        charge.add(scan.decoded_bytes)
        return checked(parse(data), kind, unsupported)

    return await door.side.run_if(len(data) > _LARGE_BYTES, decoded)


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
    """Parse a JSON object from text that passed JsonScan. Raises RequestError if it is not one."""
    try:
        content = msgspec.json.decode(body)
    except RecursionError as error:
        raise RequestError("the request is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the request is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise RequestError("the request must be a JSON object")
    return content


def checked(content: Mapping[str, Any], kind: type[T], unsupported: Mapping[str, tuple[Any, ...]]) -> T:
    """Convert `content` to `kind`; null means that a field is left out.

    Raises RequestError as `read_request` does.
    """
    known = kind.__struct_fields__
    for name, value in content.items():
        if name not in known and name not in unsupported:
            raise RequestError(f"{name} is not a known field", field=name)
        if name in unsupported and not _asks_nothing(value, unsupported[name]):
            raise RequestError(f"{name} is not supported{_instead(unsupported[name])}", field=name)
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise RequestError(f"{name} is out of range", field=name)
    given = {name: value for name, value in content.items() if value is not None and name in known}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _located(str(error)) from error


def _asks_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Return whether `value` is null or one of the `harmless` values. JSON's true is not equal to 1."""
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless
    )


def _instead(harmless: tuple[Any, ...]) -> str:
    """Return the part of an error message that lists the accepted values of an unsupported field."""
    values = " or ".join(msgspec.json.encode(value).decode() for value in harmless)
    return f": leave it out, or say {values}" if values else ": leave it out"


def _located(message: str) -> RequestError:
    """Convert msgspec's "Expected `int`, got `str` - at `$.n`" to an error about the field n."""
    match = _PLACE.match(message)
    path = match["path"] if match else None
    if match is None or not path:
        missing = re.search(r"missing required field `(\w+)`", message)
        return (
            RequestError(f"{missing[1]} is required", field=missing[1]) if missing else RequestError(message)
        )
    name = _NAME.match(path)
    what = match["what"]
    return RequestError(f"{path}: {what[:1].lower()}{what[1:]}", field=name[0] if name else None)
