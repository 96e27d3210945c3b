"""Admission to a draft service: its limits, and the number of targets for which drafting still pays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streamserve.draft_service.server.accounts import Account
from streamserve.draft_service.server.sessions import Session
from streamserve.draft_service.server.statistics import Statistics
from streamserve.draft_service.star import Star, all_gain
from streamserve.protocol.drafting import (
    MAX_DELTAS,
    MAX_DEPTH,
    MAX_MESSAGE_BYTES,
    MAX_NODES,
    MAX_TOKENS,
    DraftRequests,
    Reason,
)

FAILED_SECONDS, LONGEST_SECONDS = 0.5, 60.0
"""Seconds without drafts for a session whose batch failed although no other session was in it: after the
first failure, doubled after each further one, and the maximum."""


@dataclass(frozen=True)
class Limits:
    """Limits of one service.

    - `retry`: seconds until a refused message may be sent again, unless a better time is known.
    - `active_for`: a session counts as a target for this many seconds after it was drafted for.
    - `by_model`: whether the active targets are limited to N_max.
    """

    max_sessions: int = 64
    """Maximum number of sessions of the service. At the limit, a client that has at least two sessions less
    than another account may open a session, which replaces a session of the other account."""
    max_sequences: int = 1024
    """Maximum number of sequences of a session."""
    max_tokens: int = MAX_TOKENS
    """Maximum number of tokens of a sequence."""
    max_bytes: int = MAX_MESSAGE_BYTES
    """Maximum size of a message in bytes."""
    max_depth: int = MAX_DEPTH
    max_nodes: int = MAX_NODES
    """Maximum number of nodes of a tree; `max_depth` limits its levels."""
    max_deltas: int = MAX_DELTAS
    request_nodes: int = 16384
    """Maximum number of nodes of all trees that one message requests."""
    in_flight: int = 4096
    """Maximum number of sequences of one account with trees in flight; `total_in_flight` limits all accounts
    together."""
    total_in_flight: int = 16384
    batch_nodes: int = 4096
    batch_tokens: int = 2048
    """Maximum number of tokens read in one batch; `batch_nodes` limits the nodes of all its trees."""
    storage_bytes: int = 512 << 20
    """Maximum number of bytes of all stored sequences and trees; see draft_service/server/storage.py."""
    rate: float = 2000.0
    burst: float = 4000.0
    """`rate`: maximum number of messages of a client per second; `burst`: in a burst."""
    total_rate: float = 20000.0
    byte_rate: float = 16.0 * (1 << 20)
    byte_burst: float = 32.0 * (1 << 20)
    """`byte_rate`: maximum number of bytes of a client per second; `byte_burst`: in a burst."""
    total_byte_rate: float = 64.0 * (1 << 20)
    retry: float = 1.0
    longest_retry: float = 30.0
    active_for: float = 1.0
    by_model: bool = True


class TargetAdmission:
    """Decides which targets are drafted for, by `limits` and by the model of draft_service/star.py with
    measured values."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def active(self, session: Session, now: float) -> bool:
        """Return whether a session counts as active: as one of the N targets in the model of
        draft_service/star.py."""
        if session.requested_at is not None:
            return True
        return session.served is not None and now - session.served < self._limits.active_for

    def n_max(self, statistics: Statistics, star: Star) -> int:
        """Return N_max, or the limit of sessions while too little has been measured to compute N_max."""
        if not (self._limits.by_model and statistics.known and statistics.plain.count):
            return self._limits.max_sessions
        return min(star.n_max(statistics.progress, statistics.plain.value), self._limits.max_sessions)

    def all_gain(self, sessions: Sequence[Session], statistics: Statistics, capacity: Star) -> bool:
        """Return whether each of these sessions is faster with drafts if the service drafts for all of them,
        and whether their number is within the limit. Each session is judged by its measured depth, acceptance
        and plain steps; before enough is measured, only their number counts."""
        if not (self._limits.by_model and statistics.known and statistics.plain.count):
            return len(sessions) <= self._limits.max_sessions
        rounds = [
            statistics.round_of(capacity, one.depth.value, one.plain.value, one.accepted, one.tested)
            for one in sessions
        ]
        return len(sessions) <= self._limits.max_sessions and all_gain(rounds, capacity.batch_seconds)

    def those_ahead(
        self, account: Account, active: Iterable[Session], session: Session | None
    ) -> list[Session]:
        """Return the `active` sessions that rank before `session` of `account`; None stands for a new
        session.

        The first session of every account ranks before the second session of any account. Sessions of one
        account rank by age, and so do sessions of equal rank.
        """
        ranks: dict[Account, int] = {}
        others: list[tuple[tuple[int, float, int], Session]] = []
        own: tuple[int, float, int] | None = None
        for other in sorted(active, key=lambda one: (one.opened, one.tag)):
            rank = ranks[other.account] = ranks.get(other.account, -1) + 1
            if other is session:
                own = rank, other.opened, other.tag
            else:
                others.append(((rank, other.opened, other.tag), other))
        if own is None:
            own = ranks.get(account, -1) + 1, float("inf"), 0
        return [other for rank_key, other in others if rank_key < own]

    def exceeded_limit(
        self, session: Session, message: DraftRequests, sessions: Iterable[Session]
    ) -> Reason | None:
        """Return the limit that a message of a session would exceed, or None."""
        limits = self._limits
        if len(message.deltas) > limits.max_deltas:
            return "rate"  # many deltas in one message would bypass the rate limit
        if sum(min(max(delta.nodes, 0), limits.max_nodes) for delta in message.deltas) > limits.request_nodes:
            return "nodes"
        if not message.deltas:
            return None
        accounts = {other.account for other in sessions}
        total = len(message.deltas) + sum(account.in_flight for account in accounts)
        own = len(message.deltas) + session.account.in_flight
        return "in-flight" if own > limits.in_flight or total > limits.total_in_flight else None


def block_seconds(failures: int) -> float:
    """Return the seconds for which a session gets no drafts after `failures` failed batches in which it was
    alone."""
    return min(FAILED_SECONDS * 2.0 ** min(failures - 1, 20), LONGEST_SECONDS)


def session_to_close(sessions: Iterable[Session], own: int) -> Session | None:
    """Return the session to close for another client that has `own` sessions: the session unheard for longest
    among the accounts with the most sessions. None if that account has fewer than two sessions more than the
    client."""
    oldest = min(sessions, key=lambda one: (-one.account.sessions, one.heard), default=None)
    return oldest if oldest is not None and oldest.account.sessions >= own + 2 else None
