"""Idempotency cache: replies cached by Idempotency-Key, so that a retry has no second effect."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import msgspec

from streamserve.protocol.errors import RequestError

MAX_REPLIES = 1024
MAX_REPLY_BYTES = 64 << 10
"""Maximum size of a cached reply, in bytes of JSON."""
MAX_CACHED_BYTES = 8 << 20
"""Maximum size of all cached replies, in bytes; the oldest are evicted."""
MAX_KEY_CHARACTERS = 255

T = TypeVar("T")


class _Name(NamedTuple):
    """The key of a cached reply. It includes the caller: different callers may choose the same idempotency
    key."""

    caller: str
    operation: str
    key: str


class IdempotencyCache:
    """The latest replies, by caller, operation and the caller's idempotency key."""

    def __init__(self) -> None:
        self._replies: OrderedDict[_Name, tuple[bytes, asyncio.Task[Any]]] = OrderedDict()
        self._sizes: dict[_Name, int] = {}
        self._bytes = 0

    async def run_once(
        self,
        caller: str,
        operation: str,
        key: str | None,
        body: msgspec.Struct,
        work: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        """Return the reply of `work`, run now, or the reply cached for this key of the caller.

        With a key, the work continues when its client disconnects, so that a retry finds the reply. Failed
        work is not cached. Raises RequestError if the caller used the key with another body, and any error of
        `work`.
        """
        if key is None:
            return await work()
        if not 0 < len(key) <= MAX_KEY_CHARACTERS:
            raise RequestError(f"an Idempotency-Key has 1 to {MAX_KEY_CHARACTERS} characters")
        name, digest = _Name(caller, operation, key), blake2b(msgspec.json.encode(body)).digest()
        if name not in self._replies:
            task = asyncio.get_running_loop().create_task(work())
            self._replies[name] = digest, task
            task.add_done_callback(lambda done: self._done(name, done))
            if len(self._replies) > MAX_REPLIES:
                self._evict(next(iter(self._replies)))
        cached_digest, task = self._replies[name]
        if cached_digest != digest:
            raise RequestError("this Idempotency-Key was used for another request", status=409)
        return await asyncio.shield(task)

    def _done(self, name: _Name, task: asyncio.Task[Any]) -> None:
        if self._replies.get(name, (b"", None))[1] is not task:
            return
        reply = None if task.cancelled() or task.exception() else task.result()
        size = 0 if reply is None else _size(reply)
        if reply is None or size > MAX_REPLY_BYTES:
            self._evict(name)
            return
        self._sizes[name] = size
        self._bytes += size
        while self._bytes > MAX_CACHED_BYTES:
            self._evict(next(iter(self._sizes)))

    def _evict(self, name: _Name) -> None:
        del self._replies[name]
        self._bytes -= self._sizes.pop(name, 0)


def _size(reply: Any) -> int:
    return len(reply if isinstance(reply, bytes) else msgspec.json.encode(reply))
