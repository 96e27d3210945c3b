"""Idempotency cache: replies stored by Idempotency-Key, so that a retry does nothing twice."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from streamserve.protocol.errors import RequestError

MAX_REPLIES = 1024
MAX_REPLY_BYTES = 64 << 10
"""Longer replies, as JSON, are not cached."""
MAX_CACHED_BYTES = 8 << 20
"""Total size of the cached replies; the oldest are evicted."""
MAX_KEY_CHARACTERS = 255

T = TypeVar("T")


def caller(headers: Mapping[str, str]) -> str:
    """Return a digest that identifies the caller: the same key of two callers is not the same."""
    return blake2b(headers.get("authorization", "").encode(), digest_size=16).hexdigest()


class IdempotencyCache:
    """The latest replies, by operation and the client's key."""

    def __init__(self) -> None:
        self._replies: OrderedDict[tuple[str, str], tuple[bytes, asyncio.Task[Any]]] = OrderedDict()
        self._sizes: dict[tuple[str, str], int] = {}
        self._bytes = 0

    async def run_once(
        self,
        operation: str,
        key: str | None,
        body: msgspec.Struct,
        work: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        """Return the reply of `work`, run now, or the reply cached for this key.

        With a key, the work continues when its client disconnects, so that a retry finds the reply. Failed
        work is not cached. Raises RequestError if the key was used for another body, and whatever `work`
        raises.
        """
        if key is None:
            return await work()
        if not 0 < len(key) <= MAX_KEY_CHARACTERS:
            raise RequestError(f"an Idempotency-Key has 1 to {MAX_KEY_CHARACTERS} characters")
        name, digest = (operation, key), blake2b(msgspec.json.encode(body)).digest()
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

    def _done(self, name: tuple[str, str], task: asyncio.Task[Any]) -> None:
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

    def _evict(self, name: tuple[str, str]) -> None:
        del self._replies[name]
        self._bytes -= self._sizes.pop(name, 0)


def _size(reply: Any) -> int:
    return len(reply if isinstance(reply, bytes) else msgspec.json.encode(reply))
