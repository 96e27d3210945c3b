"""Replies kept under their Idempotency-Key, so that a retry does nothing twice."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from streamserve.protocol.errors import RequestError

MAX_KEPT = 1024
MAX_REPLY_BYTES = 64 << 10
"""Replies that are longer are not kept."""
MAX_KEY_CHARACTERS = 255

T = TypeVar("T")


def caller(headers: Mapping[str, str]) -> str:
    """Stands for who asks: the same key of two callers is not the same."""
    return blake2b(headers.get("authorization", "").encode(), digest_size=16).hexdigest()


class Replays:
    """The latest replies, by what was asked for and the client's key."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[bytes, asyncio.Task[Any]]] = OrderedDict()

    async def once(
        self,
        what: str,
        key: str | None,
        body: msgspec.Struct,
        work: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        """The reply of `work`, done now, or of the work that was done for this key before. With a key it
        goes on when its client leaves, so that a retry finds the reply. Work that failed is not kept.

        Raises RequestError if the key was used for another body, and whatever `work` raises.
        """
        if key is None:
            return await work()
        if not 0 < len(key) <= MAX_KEY_CHARACTERS:
            raise RequestError(f"an Idempotency-Key has 1 to {MAX_KEY_CHARACTERS} characters")
        name, digest = (what, key), blake2b(repr(body).encode()).digest()
        if name not in self._kept:
            task = asyncio.get_running_loop().create_task(work())
            self._kept[name] = digest, task
            task.add_done_callback(lambda done: self._done(name, done))
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        known, task = self._kept[name]
        if known != digest:
            raise RequestError("this Idempotency-Key was used for another request", status=409)
        return await asyncio.shield(task)

    def _done(self, name: tuple[str, str], task: asyncio.Task[Any]) -> None:
        reply = None if task.cancelled() or task.exception() else task.result()
        if reply is None or (isinstance(reply, bytes) and len(reply) > MAX_REPLY_BYTES):
            self._kept.pop(name, None)
