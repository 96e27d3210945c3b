"""Requests that a client repeats with the same Idempotency-Key, possibly after the server was restarted. The
key determines the seed, so that the answer is the same text. Output that workers have kept of an earlier
request is sent first, without computing it again."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
from starlette.requests import HTTPConnection

from streamserve.api.http.auth import caller_of
from streamserve.api.openai.schemas import SamplingFields
from streamserve.protocol.errors import RequestError

KEY_HEADER = "Idempotency-Key"
MAX_KEY_CHARACTERS = 255
KEY_PARAMETER: dict[str, Any] = {
    "name": KEY_HEADER,
    "in": "header",
    "description": "sets the seed if the body does not: equal requests with the same key get the same text",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARACTERS},
}

T = TypeVar("T", bound=SamplingFields)


def key_of(request: HTTPConnection) -> str:
    """Return the idempotency key of a request, which `with_key_seed` has checked; "" if it has none. The
    caller's id is a part of it, because two callers may choose the same key."""
    key = request.headers.get(KEY_HEADER, "")
    return f"{caller_of(request)}/{key}" if key else ""


def with_key_seed(body: T, headers: Mapping[str, str]) -> T:
    """Return `body` with a seed derived from its idempotency key. Unchanged if it has a seed, or if there is
    no key.

    Raises RequestError if the key is empty or too long.
    """
    key = headers.get(KEY_HEADER)
    if key is None:
        return body
    if not 0 < len(key) <= MAX_KEY_CHARACTERS:
        raise RequestError(f"an {KEY_HEADER} has 1 to {MAX_KEY_CHARACTERS} characters", field=KEY_HEADER)
    if body.seed is not None:
        return body
    digest = blake2b(key.encode(), digest_size=8).digest()
    return msgspec.structs.replace(body, seed=int.from_bytes(digest, "little"))
