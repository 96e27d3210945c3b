"""The sequences that a draft service drafts for: what of each the drafter was told, and where its KV lies.

delta ── take ──▶ sequence ── request ──▶ drafter ── settle ──▶ answer

A sequence stays on the shelf from its first delta until it is dropped. To the drafter it goes by an id of
its own, a new one whenever what the drafter knows of it does not hold any more.
"""

from collections.abc import Mapping

from streamserve.draft_service.server.memory import Memory
from streamserve.draft_service.server.sessions import DraftedSequence, Session, accepted_guesses
from streamserve.engine.plan import DraftRequest
from streamserve.protocol.drafting import Delta, Draft, Tree
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.tree import TokenTree

NOBODY = 0
"""The id of a sequence that is nobody's."""
GREEDY = SamplingParams(temperature=0.0)


class Shelf:
    """Sequences of up to `longest` tokens; prompts are read in pieces of `max_read`."""

    def __init__(self, memory: Memory, longest: int, max_read: int) -> None:
        self.memory = memory
        self.rebuilt = 0
        """Sequences whose KV was computed again after an eviction."""
        self._longest = longest
        self._max_read = max_read
        self._ids = 0
        self._released: list[int] = []

    def take(self, session: Session, delta: Delta, now: float) -> tuple[int, int] | None:
        """Go on by a delta: how many guesses of the last answer were right, and how many were tested. None if
        what it builds on is not known."""
        known = session.sequences.get(delta.sequence)
        if known is None:
            if delta.base or delta.keep or delta.params is None:
                return None
            known = DraftedSequence(self._new_id(), delta.sequence, session.account, delta.params, used=now)
            session.sequences[delta.sequence] = known
        if delta.number <= known.number:
            return 0, 0
        if known.number < delta.base or len(known.tokens) < delta.keep:
            return None
        judged = 0, 0
        if known.answer is not None and delta.epoch == known.epoch and delta.keep == len(known.tokens):
            judged = accepted_guesses(known.answer, delta.tokens)
        if delta.epoch != known.epoch:
            self._rename(known)
        known.take(delta)
        if len(known.tokens) + delta.nodes > self._longest:
            known.want(None)
            known.answer = Draft(known.name, known.epoch, known.number, None)
        return judged

    def unread(self, sequence: DraftedSequence) -> int:
        """Tokens that the next request for it has the drafter read."""
        return min(len(sequence.tokens) - sequence.computed, self._max_read)

    def request(self, sequence: DraftedSequence, now: float) -> DraftRequest | None:
        """The next piece of a sequence's prompt, or its tree; None if there is no memory for it now, that of
        evicted ones included."""
        delta = sequence.wanted
        assert delta is not None
        length = len(sequence.tokens)
        reading = length - sequence.computed > self._max_read
        end = sequence.computed + self._max_read if reading else length
        if not self.memory.reserve(sequence, end + (0 if reading else delta.nodes)):
            return None
        if sequence.told > sequence.computed and not sequence.computed:
            self.rebuilt += 1
        if end < sequence.told:  # evicted: the drafter is told again what it has to read again
            self._rename(sequence)
        new = sequence.tokens[sequence.told : end]
        keep = sequence.told
        if not new:
            keep, new = end - 1, sequence.tokens[end - 1 : end]
        sequence.begin(end)
        sequence.used = now
        return DraftRequest(
            id=sequence.id,
            epoch=sequence.epoch,
            keep=keep,
            new_tokens=new,
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

    def settle(
        self, sequence: DraftedSequence, request: DraftRequest, trees: Mapping[int, TokenTree]
    ) -> Draft | None:
        """A request is done; what to tell of it, if it is not to be gone on with."""
        sequence.end()
        if sequence.gone:
            self.memory.release(sequence)
            return None
        delta, tree = sequence.wanted, trees.get(request.id)
        reached = request.keep + len(request.new_tokens)
        if delta is None or sequence.id != request.id or reached < len(sequence.tokens):
            return None  # there is more to read, or it was told otherwise meanwhile
        sequence.want(None)
        sequence.answer = Draft(
            sequence.name,
            sequence.epoch,
            sequence.number,
            Tree(tree.tokens, tree.parents, tree.scores, tree.accept) if tree else None,
        )
        return sequence.answer

    def put_back(self, sequence: DraftedSequence) -> None:
        """What was to be drafted for it was not; it still waits."""
        sequence.running, sequence.computed = False, 0
        if sequence.gone:
            self.memory.release(sequence)

    def read_anew(self, sequence: DraftedSequence) -> None:
        """What the drafter knows of it is not to be trusted."""
        if not sequence.gone:
            self.memory.release(sequence)
            self._rename(sequence)

    def drop(self, sequence: DraftedSequence) -> None:
        """It is not wanted any more; blocks that are being written stay its own until that is over."""
        self._released.append(sequence.id)
        sequence.gone = True
        sequence.want(None)
        if not sequence.running:
            self.memory.release(sequence)

    def spare(self) -> DraftRequest | None:
        """A pass over one token that is nobody's, for `return_spare` to take back; None if memory is full."""
        if not self.memory.pool.free:
            return None
        return DraftRequest(
            id=NOBODY, epoch=0, keep=0, new_tokens=[0], choice=0, output=0, params=GREEDY, depth=1, width=1,
            nodes=1, computed=0, blocks=[self.memory.pool.allocate()],
        )  # fmt: skip

    def return_spare(self, request: DraftRequest) -> None:
        """It is done."""
        self.memory.pool.release(request.blocks)
        self._released.append(request.id)

    def take_released(self) -> list[int]:
        """Ids that the drafter may forget."""
        released, self._released = self._released, []
        return released

    def _rename(self, sequence: DraftedSequence) -> None:
        """To the drafter an edited sequence is another one, though its KV stays as far as it holds."""
        self._released.append(sequence.id)
        sequence.id, sequence.told = self._new_id(), 0

    def _new_id(self) -> int:
        self._ids += 1
        return self._ids
