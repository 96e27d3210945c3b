"""Request bodies: read within a limit, parsed strictly, every complaint naming the field."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import Request

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
        return _checked(_parse(body), kind, unsupported)
    return await asyncio.to_thread(lambda: _checked(_parse(body), kind, unsupported))


def described(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """`kind` as the request body of a route, for the OpenAPI page."""
    schema = msgspec.json.schema(kind)
    inlined = _inlined(schema["$defs"][kind.__name__], schema["$defs"])
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """`schema` with its references replaced by what they refer to."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    return {name: _inlined(part, definitions) for name, part in schema.items()}


async def _read(request: Request, limit: int) -> bytearray:
    too_large = RequestError(f"the request is larger than {limit} bytes", status=413)
    if int(request.headers.get("content-length", 0)) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return body


def _parse(body: bytearray) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(body)
    except RecursionError as error:
        raise RequestError("the request is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the request is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise RequestError("the request must be a JSON object")
    return content


def _checked(content: Mapping[str, Any], kind: type[T], unsupported: Mapping[str, tuple[Any, ...]]) -> T:
    """`content` as `kind`. A null is a field left out."""
    known = kind.__struct_fields__
    for name, value in content.items():
        if name not in known and name not in unsupported:
            raise RequestError(f"{name} is not a known field", field=name)
        if name in unsupported and value is not None and value not in unsupported[name]:
            raise RequestError(f"{name} is not supported", field=name)
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise RequestError(f"{name} is out of range", field=name)
    given = {name: value for name, value in content.items() if value is not None and name in known}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _located(str(error)) from error


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
