"""Rate limits of a draft service: messages and bytes per second, charged by the size of raw frames before
they are decoded, for each client and in total.

Each client may use up to a separate limit. When all together use up the total, each still gets an equal share
of it.
"""

from collections import OrderedDict
from dataclasses import dataclass

from streamserve.draft_service.server.admission import Limits
from streamserve.protocol.drafting import Reason
from streamserve.system.token_bucket import TokenBucket

MAX_SOURCES = 4096
"""Maximum number of remembered clients; the one that was silent for longest is forgotten first."""
RECENT = 1.0
"""Seconds after its last message for which a client counts among the clients that share the total."""
NOTIFY_SECONDS = 0.1
"""Minimum seconds between two answers to undecoded messages of one client."""


@dataclass
class _Source:
    messages: TokenBucket
    bytes: TokenBucket
    share: TokenBucket
    heard: float
    notified: float = float("-inf")


@dataclass(frozen=True)
class RateExceeded:
    """A message must not be decoded, for `reason`, and may be sent again after `retry` seconds. `notify` is
    false if its sender was notified within NOTIFY_SECONDS."""

    reason: Reason
    retry: float
    notify: bool


class RateLimiter:
    """Charges received messages by `limits`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._messages: TokenBucket | None = None
        self._bytes: TokenBucket | None = None
        self._sources: OrderedDict[bytes, _Source] = OrderedDict()

    def charge(self, source: bytes, size: int, now: float) -> RateExceeded | None:
        """Charge for a message of `size` bytes; return None if it fits the limits, else why it does not. A
        refused message costs nothing."""
        known = self._source(source, now)
        total = self._total(now)
        waits: list[tuple[float, Reason]] = [
            (known.messages.wait(1.0, now), "rate"),
            (known.bytes.wait(size, now), "bytes"),
        ]
        wait, reason = max(waits, key=lambda one: one[0])
        if not wait:
            waits = [(total[0].wait(1.0, now), "rate"), (total[1].wait(size, now), "bytes")]
            wait, reason = max(waits, key=lambda one: one[0])
            share = self._limits.total_byte_rate / self._recent(now)
            if wait and not known.share.wait(size, now, share):
                wait = 0.0  # other clients use up the total, but this client is within its share
        if wait:
            notify = now - known.notified >= NOTIFY_SECONDS
            known.notified = now if notify else known.notified
            return RateExceeded(reason, min(max(wait, NOTIFY_SECONDS), self._limits.longest_retry), notify)
        for charged, amount in ((known.messages, 1.0), (known.bytes, size), (known.share, size)):
            charged.level -= amount
        # Messages within a client's share are accepted even if the total is used up. Charge the total for
        # them all the same: the debt limits the other clients to the remainder.
        total[0].level = max(total[0].level - 1.0, -total[0].burst)
        total[1].level = max(total[1].level - size, -total[1].burst)
        return None

    def _source(self, source: bytes, now: float) -> _Source:
        limits = self._limits
        known = self._sources.get(source)
        if known is None:
            if len(self._sources) >= MAX_SOURCES:
                self._sources.popitem(last=False)
            known = self._sources[source] = _Source(
                TokenBucket(limits.rate, limits.burst, now),
                TokenBucket(limits.byte_rate, limits.byte_burst, now),
                TokenBucket(limits.total_byte_rate, limits.max_bytes, now),
                now,
            )
        self._sources.move_to_end(source)
        known.heard = now
        return known

    def _total(self, now: float) -> tuple[TokenBucket, TokenBucket]:
        limits = self._limits
        if self._messages is None or self._bytes is None:
            self._messages = TokenBucket(limits.total_rate, limits.total_rate, now)
            self._bytes = TokenBucket(limits.total_byte_rate, limits.total_byte_rate, now)
        return self._messages, self._bytes

    def _recent(self, now: float) -> int:
        """Return the number of recently heard clients, including this one; at least 1."""
        count = 0
        for source in reversed(self._sources.values()):
            if now - source.heard > RECENT:
                break
            count += 1
        return max(count, 1)
