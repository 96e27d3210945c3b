"""Request bodies: read within a limit, parsed strictly, every complaint naming the field."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from streamserve.api.limits import check_depth
from streamserve.protocol.errors import RequestError

_THREAD_ABOVE = 1 << 20
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")

T = TypeVar("T", bound=msgspec.Struct)


async def read_request(
    request: Request, limit: int, kind: type[T], unsupported: Mapping[str, tuple[Any, ...]]
) -> T:
    """The body of `request` as `kind`.

    `unsupported` are fields we know but cannot obey, with those values that ask nothing of us. Raises
    RequestError if the body is larger than `limit` bytes or no JSON object, or naming the first field that is
    unknown, unsupported or not of its type.
    """
    body = await _read(request, limit)
    if len(body) <= _THREAD_ABOVE:
        return checked(parse(body), kind, unsupported)
    return await asyncio.to_thread(lambda: checked(parse(body), kind, unsupported))


async def _read(request: Request, limit: int) -> bytearray:
    too_large = RequestError(
        f"the request is larger than {limit} bytes, which is the limit (max_body_bytes)", status=413
    )
    if int(request.headers.get("content-length", 0)) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return body


def parse(body: bytes | bytearray) -> dict[str, Any]:
    """A JSON object. Raises RequestError if it is none, or nested too deeply."""
    try:
        content = msgspec.json.decode(body)
    except RecursionError as error:
        raise RequestError("the request is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the request is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise RequestError("the request must be a JSON object")
    check_depth(content)
    return content


def checked(content: Mapping[str, Any], kind: type[T], unsupported: Mapping[str, tuple[Any, ...]]) -> T:
    """`content` as `kind`. A null is a field left out. Raises RequestError as `read_request` does."""
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
    """Whether `value` is null or one of the `harmless` ones. JSON's true is not 1."""
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless
    )


def _instead(harmless: tuple[Any, ...]) -> str:
    """What may be said in the place of something unsupported."""
    values = " or ".join(msgspec.json.encode(value).decode() for value in harmless)
    return f": leave it out, or say {values}" if values else ": leave it out"


def _located(message: str) -> RequestError:
    """msgspec's "Expected `int`, got `str` - at `$.n`" as a complaint about n."""
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
