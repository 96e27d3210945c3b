"""Limit on the bytes of the sequences that a draft service stores; space is freed before a sequence is
stored.

At the limit the account that stores the most loses sequences, the least recently used first. That only costs
time: when the target continues a lost sequence, it receives Lost and syncs the sequence again.
"""

from collections.abc import Callable, Mapping

from streamserve.draft_service.server.sessions import DraftedSequence, Session
from streamserve.protocol.drafting import Delta
from streamserve.protocol.sampling import SamplingParams

TOKEN_BYTES = 80
"""Bytes of a token: its number, and its entries in the lists of service, drafter and path state."""
NODE_BYTES = 160
SEQUENCE_BYTES = 32768
"""Bytes that the limit counts for each sequence besides its tokens. A sequence takes fewer; the excess bounds
the number of sequences."""
ENTRY_BYTES = 160
"""Bytes of a logit bias, or of a token that a request allows."""
SPARE = 0.1
"""Share of the limit that is freed at once, since a scan of all sequences takes a while."""


def size(tokens: int, nodes: int, params: SamplingParams) -> int:
    """Return the bytes that the limit counts for a sequence of `tokens` tokens with a tree of `nodes`
    nodes."""
    listed = len(params.logit_bias) + len(params.allowed_token_ids) + len(params.stop_token_ids)
    return SEQUENCE_BYTES + tokens * TOKEN_BYTES + nodes * NODE_BYTES + listed * ENTRY_BYTES


class StorageLimiter:
    """Tracks the bytes stored by `sessions` and limits them to `limit`. `drop` removes a sequence of a
    session, and calls `release`."""

    def __init__(
        self,
        limit: int,
        sessions: Mapping[int, Session],
        drop: Callable[[Session, DraftedSequence], None],
    ) -> None:
        self.limit = limit
        self.total = 0
        self.dropped = 0
        """Sequences that were dropped to free space."""
        self._sessions = sessions
        self._drop = drop

    def free_space(self, session: Session, delta: Delta) -> bool:
        """Free space for `delta` by dropping sequences of this account, or of accounts that store more than
        this one would then. Return False, without dropping any, if that is not enough. Sequences being
        drafted for stay."""
        known = session.sequences.get(delta.sequence)
        params = delta.params or (known.params if known else SamplingParams())
        tokens = (min(delta.retained, len(known.tokens)) if known else 0) + len(delta.tokens)
        growth = size(tokens, delta.nodes, params) - (known.stored_bytes if known else 0)
        over = self.total + growth - self.limit
        if growth <= 0 or over <= 0:
            return True
        own = session.account
        droppable = [
            (owner, sequence)
            for owner in self._sessions.values()
            if owner.account is own or owner.account.stored_bytes > own.stored_bytes + growth
            for sequence in owner.sequences.values()
            if not sequence.running and sequence is not known
        ]
        if sum(sequence.stored_bytes for _, sequence in droppable) < over:
            return False
        goal = over + SPARE * self.limit
        for victim in sorted(droppable, key=_order):
            if goal <= 0:
                break
            goal -= victim[1].stored_bytes
            self.dropped += 1
            self._drop(*victim)
        return True

    def recount(self, session: Session, sequence: DraftedSequence) -> None:
        """Count a sequence in its present size."""
        nodes = sequence.requested.nodes if sequence.requested else 0
        if sequence.answer is not None and sequence.answer.tree is not None:
            nodes = len(sequence.answer.tree.tokens)
        self._set(session, sequence, size(len(sequence.tokens), nodes, sequence.params))

    def release(self, session: Session, sequence: DraftedSequence) -> None:
        """Stop counting a sequence."""
        self._set(session, sequence, 0)

    def _set(self, session: Session, sequence: DraftedSequence, stored_bytes: int) -> None:
        change = stored_bytes - sequence.stored_bytes
        sequence.stored_bytes = stored_bytes
        session.account.stored_bytes += change
        self.total += change


def _order(item: tuple[Session, DraftedSequence]) -> tuple[int, bool, float]:
    session, sequence = item
    return -session.account.stored_bytes, sequence.requested is not None, sequence.used
