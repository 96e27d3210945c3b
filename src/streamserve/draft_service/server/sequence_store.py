"""The sequence store of a draft service: the tokens of each sequence, and its KV blocks.

delta ── apply ──▶ sequence ── request ──▶ drafter ── finish ──▶ answer

A sequence is stored from its first delta until it is dropped. The drafter knows it by a separate id, replaced
whenever the drafter's state of it is no longer valid.
"""

from collections.abc import Mapping

from streamserve.contracts.plan import DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.draft_service.server.memory import Memory
from streamserve.draft_service.server.sessions import DraftedSequence, Session, accepted_tokens
from streamserve.protocol.drafting import Delta, Draft, Tree
from streamserve.protocol.sampling import SamplingParams

DUMMY_ID = 0
"""The id of the sequence of dummy passes."""
GREEDY = SamplingParams(temperature=0.0)


class SequenceStore:
    """The sequences of all sessions, with KV blocks from `memory`. A sequence has up to `longest` tokens,
    including the tree to draft. The drafter computes the KV of a prompt in chunks of `max_read` tokens."""

    def __init__(self, memory: Memory, longest: int, max_read: int) -> None:
        self.memory = memory
        self.rebuilt = 0
        """Sequences whose KV was recomputed after an eviction."""
        self._longest = longest
        self._max_read = max_read
        self._ids = 0
        self._released: list[int] = []

    def apply(self, session: Session, delta: Delta, now: float) -> tuple[int, int] | None:
        """Apply a delta; return how many draft tokens of the sequence's last tree were accepted and how many
        were tested. Return None if the delta builds on state that is not stored: the target has to sync the
        sequence again."""
        known = session.sequences.get(delta.sequence)
        if known is None:
            if delta.base or delta.retained or delta.params is None:
                return None
            known = DraftedSequence(self._new_id(), delta.sequence, session.account, delta.params, used=now)
            session.sequences[delta.sequence] = known
        if delta.number <= known.number:
            return 0, 0
        if known.number < delta.base or len(known.tokens) < delta.retained:
            return None
        verified = 0, 0
        if known.answer is not None and delta.epoch == known.epoch and delta.retained == len(known.tokens):
            verified = accepted_tokens(known.answer, delta.tokens)
        if delta.epoch != known.epoch:
            self._rename(known)
        known.apply(delta)
        if len(known.tokens) + delta.nodes > self._longest:
            known.set_request(None)
            known.answer = Draft(known.name, known.epoch, known.number, None) if delta.depth else None
        return verified

    def unread(self, sequence: DraftedSequence) -> int:
        """Return the number of tokens that the drafter reads for the sequence's next request."""
        return min(len(sequence.tokens) - sequence.computed, self._max_read)

    def request(self, sequence: DraftedSequence, now: float) -> DraftRequest | None:
        """Return the request for the next chunk of a sequence's prompt, or for its tree; None if there are no
        KV blocks for it now, even with eviction."""
        delta = sequence.requested
        assert delta is not None
        length = len(sequence.tokens)
        reading = length - sequence.computed > self._max_read
        end = sequence.computed + self._max_read if reading else length
        if not self.memory.reserve(sequence, end + (0 if reading else delta.nodes)):
            return None
        if sequence.read and not sequence.computed:
            self.rebuilt += 1
        sequence.begin(end)
        sequence.used = now
        return DraftRequest(
            id=sequence.id,
            epoch=sequence.epoch,
            tokens=sequence.tokens,
            length=end,
            choice=delta.choice,
            output=delta.output if not reading else 0,
            params=sequence.params,
            depth=0 if reading else delta.depth,
            width=delta.width,
            nodes=0 if reading else delta.nodes,
            expansion=delta.expansion,
            computed=sequence.computed,
            blocks=list(sequence.blocks),
        )

    def finish(
        self, sequence: DraftedSequence, request: DraftRequest, trees: Mapping[int, TokenTree]
    ) -> Draft | None:
        """Process a finished request; return the answer, or None if the sequence has to continue."""
        sequence.end()
        if sequence.dropped:
            self.memory.release(sequence)
            return None
        delta, tree = sequence.requested, trees.get(request.id)
        if delta is None or sequence.id != request.id or request.length < len(sequence.tokens):
            return None  # the prompt has more chunks, or was edited while it was read
        if delta.depth and not request.depth:
            return None  # the request was only read ahead, and a tree was requested meanwhile
        sequence.set_request(None)
        if not delta.depth:
            return None
        sequence.answer = Draft(
            sequence.name,
            sequence.epoch,
            sequence.number,
            Tree(tree.tokens, tree.parents, tree.scores, tree.accept) if tree else None,
        )
        return sequence.answer

    def requeue(self, sequence: DraftedSequence) -> None:
        """Reset a sequence after its request failed; the sequence still waits for a batch."""
        sequence.running, sequence.computed = False, 0
        if sequence.dropped:
            self.memory.release(sequence)

    def invalidate(self, sequence: DraftedSequence) -> None:
        """Discard the drafter's state of a sequence, which may be wrong."""
        if not sequence.dropped:
            self.memory.release(sequence)
            self._rename(sequence)

    def drop(self, sequence: DraftedSequence) -> None:
        """Drop a sequence. If a batch is writing its blocks, they are released when the batch ends."""
        self._released.append(sequence.id)
        sequence.dropped = True
        sequence.set_request(None)
        if not sequence.running:
            self.memory.release(sequence)

    def dummy_pass(self) -> DraftRequest | None:
        """Return a dummy pass over one token, or None if no block is free. `release_dummy_pass` ends it."""
        if not self.memory.pool.free:
            return None
        return DraftRequest(
            id=DUMMY_ID, epoch=0, tokens=[0], length=1, choice=0, output=0, params=GREEDY, depth=1,
            width=1, nodes=1, computed=0, blocks=[self.memory.pool.allocate()],
        )  # fmt: skip

    def release_dummy_pass(self, request: DraftRequest) -> None:
        """Release the resources of a dummy pass."""
        self.memory.pool.release(request.blocks)
        self._released.append(request.id)

    def take_released(self) -> list[int]:
        """Return the ids that the drafter may forget."""
        released, self._released = self._released, []
        return released

    def _rename(self, sequence: DraftedSequence) -> None:
        """Give an edited sequence a new id for the drafter; the part of its KV that is still valid stays."""
        self._released.append(sequence.id)
        sequence.id, sequence.read = self._new_id(), 0

    def _new_id(self) -> int:
        self._ids += 1
        return self._ids
