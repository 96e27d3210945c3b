"""Responses kept in memory, bounded in number, bytes and age. Each is accessible only to the caller that
created it."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from streamserve.protocol.errors import RequestError

_ITEM_BYTES = 64
"""Memory of an item in bytes, besides its text."""


@dataclass(frozen=True)
class StoredResponse:
    """A response and its conversation, as JSON texts.

    `input` has all items that led to the response, including the items of earlier responses, so that it can
    be continued even when the earlier responses are gone. `owner` is the id of the caller that created it.
    """

    owner: str
    reply: bytes
    input: tuple[bytes, ...]
    output: tuple[bytes, ...]

    @property
    def items(self) -> tuple[bytes, ...]:
        """The items of the whole conversation."""
        return self.input + self.output

    @property
    def size(self) -> int:
        """The bytes that it is counted as. Texts that it shares with earlier responses are counted again."""
        return len(self.reply) + sum(len(item) + _ITEM_BYTES for item in self.items)


class ResponseStore:
    """Stored responses by id. `held` is the sum of their bytes. At a limit, the oldest responses are dropped;
    responses older than `ttl` seconds are dropped, too."""

    def __init__(
        self,
        max_responses: int = 1024,
        max_bytes: int = 64 << 20,
        ttl: float = 86_400.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.held = 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._clock = clock
        self._stored: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def enabled(self) -> bool:
        """Whether any response can be stored."""
        return self._max_responses > 0 and self._max_bytes > 0

    def put(self, response_id: str, response: StoredResponse) -> bool:
        """Store a response. Return False, without storing it, if it is larger than the limit for all
        responses."""
        if not self.enabled or response.size > self._max_bytes:
            return False
        self._drop_expired()
        self._stored[response_id] = (self._clock() + self._ttl, response)
        self.held += response.size
        while len(self._stored) > self._max_responses or self.held > self._max_bytes:
            self._drop(next(iter(self._stored)))
        return True

    def get(self, response_id: str, owner: str, field: str | None = None) -> StoredResponse:
        """Return a response of `owner`. Raises RequestError (404) about `field` if there is none."""
        self._drop_expired()
        _, response = self._stored.get(response_id, (0.0, None))
        if response is None or response.owner != owner:
            raise RequestError(
                f"there is no stored response {response_id[:100]!r}: it was not stored, was deleted, is "
                f"older than {self._ttl:g} seconds (stored_response_ttl), or was dropped for newer ones",
                field=field,
                status=404,
            )
        return response

    def delete(self, response_id: str, owner: str) -> None:
        """Delete a response of `owner`. Raises RequestError (404) if there is none."""
        self.get(response_id, owner)
        self._drop(response_id)

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._stored and next(iter(self._stored.values()))[0] <= now:
            self._drop(next(iter(self._stored)))

    def _drop(self, response_id: str) -> None:
        _, response = self._stored.pop(response_id)
        self.held -= response.size
