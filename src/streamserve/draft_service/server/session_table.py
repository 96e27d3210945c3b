"""The open sessions of a draft service: which targets have one, until when, and the removal of their state.

Hello ── open ──▶ session ── expire, disconnected, another Hello, Bye ──▶ close
                     └── sequences ── forget, storage limit ──▶ drop
"""

from collections.abc import Callable, Iterable

from streamserve.draft_service.server.accounts import Account, Accounts
from streamserve.draft_service.server.admission import TargetAdmission, session_to_close
from streamserve.draft_service.server.audit import Audit
from streamserve.draft_service.server.fair_batcher import FairBatcher
from streamserve.draft_service.server.sequence_store import SequenceStore
from streamserve.draft_service.server.sessions import DraftedSequence, Session
from streamserve.draft_service.server.statistics import Statistics
from streamserve.draft_service.server.storage import StorageLimiter
from streamserve.draft_service.server.types import ServiceConfig
from streamserve.protocol.drafting import Hello, Reason

RECONNECT_SECONDS = 3.0
"""Seconds after the end of its connection in which a target may reconnect before its session ends."""


class SessionTable:
    """The sessions by tag. `secret` generates channels, which must be unguessable."""

    def __init__(
        self,
        config: ServiceConfig,
        batcher: FairBatcher,
        sequence_store: SequenceStore,
        statistics: Statistics,
        audit: Audit,
        secret: Callable[[], bytes],
    ) -> None:
        self.sessions: dict[int, Session] = {}
        self.accounts = Accounts()
        self.admission = TargetAdmission(config.limits)
        self.storage = StorageLimiter(config.limits.storage_bytes, self.sessions, self._drop)
        self._config = config
        self._batcher = batcher
        self._sequence_store = sequence_store
        self._statistics = statistics
        self._audit = audit
        self._secret = secret

    def open(self, peer: bytes, hello: Hello, now: float, key: str, name: str) -> Session | Reason:
        """Return the session of a target that says Hello, or the reason why it cannot have a session now. A
        connection has at most one session: a repeated Hello returns it, and a new Hello replaces it."""
        previous = next((s for s in self.sessions.values() if s.peer == peer and s.key == key), None)
        if previous is not None and previous.nonce == hello.nonce:
            return previous
        if previous is not None:
            self.close(previous, now, "its target sent another Hello")
        if reason := self._full(key, now):
            return reason
        session = Session(
            # Random, not counted: a target that outlived a restart of this service would take another
            # target's tag for its own.
            tag=int.from_bytes(self._secret()[:6], "little") | 1,
            channel=self._secret(),
            peer=peer,
            key=key,
            name=name,
            account=self.accounts.open(key, self._config.shares.get(name, 1.0)),
            opened=now,
            heard=now,
            nonce=hello.nonce,
        )
        self.sessions[session.tag] = session
        self._audit.opened(session)
        return session

    def expire(self, now: float) -> None:
        """Close sessions whose lease has expired."""
        for session in list(self.sessions.values()):
            if now - session.heard > self._config.lease:
                reason = "its connection ended" if session.disconnected else "its lease expired"
                self.close(session, now, reason)

    def disconnected(self, peer: bytes, now: float) -> None:
        """Record that the connection of `peer` has ended. Its session ends after `RECONNECT_SECONDS`
        unless it is heard again."""
        for session in self.sessions.values():
            if session.peer == peer:
                session.disconnected = True
                session.heard = min(session.heard, now - self._config.lease + RECONNECT_SECONDS)

    def active(self, now: float) -> list[Session]:
        """Return the sessions that were drafted for recently or wait for a draft."""
        return [session for session in self.sessions.values() if self.admission.active(session, now)]

    def n_max(self) -> int:
        return self.admission.n_max(self._statistics, self._batcher.capacity())

    def admitted(self, session: Session, now: float) -> bool:
        """Return whether a session may be drafted for: it and all sessions that rank before it gain from
        drafting. Sessions that are not active rank last."""
        active = self.active(now)
        new = not self.admission.active(session, now)
        ahead = self.admission.those_ahead(session.account, active, None if new else session)
        return not ahead or self.admission.all_gain(
            [*ahead, session], self._statistics, self._batcher.capacity()
        )

    def forget(self, session: Session, names: Iterable[int]) -> None:
        """Remove sequences that a target has released."""
        for name in names:
            if sequence := session.sequences.get(name):
                self._drop(session, sequence)
        _dequeue_if_idle(session)

    def close(self, session: Session, now: float, reason: str) -> None:
        """End a session and remove all its state."""
        del self.sessions[session.tag]
        session.requested_at = None
        for sequence in list(session.sequences.values()):
            self._drop(session, sequence)
        self.accounts.close(session.account)
        self._audit.closed(session, now, reason)

    def _full(self, key: str, now: float) -> Reason | None:
        """Return why a further target with `key` cannot have a session, or None. At the limit of sessions, a
        session of the account with the most sessions is closed for it."""
        account = self.accounts.of(key) or Account(key)
        if len(self.admission.those_ahead(account, self.active(now), None)) >= self.n_max():
            return "targets"
        if len(self.sessions) >= self._config.limits.max_sessions:
            victim = session_to_close(self.sessions.values(), account.sessions)
            if victim is None:
                return "sessions"
            self.close(victim, now, "closed to give another client a session")
        return None

    def _drop(self, session: Session, sequence: DraftedSequence) -> None:
        """Remove a sequence and all its state."""
        del session.sequences[sequence.name]
        self.storage.release(session, sequence)
        self._sequence_store.drop(sequence)
        _dequeue_if_idle(session)


def _dequeue_if_idle(session: Session) -> None:
    """Take a session out of the queue if none of its sequences waits."""
    if session.requested_at is not None and not session.waiting():
        session.requested_at = session.deadline = None
