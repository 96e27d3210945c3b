"""KV transfers between workers: the sending side and the receiving side.

prefill worker                                     decode worker
Outgoing: sequence → reservation, with blocks      Incoming: reservation → sequence that waits for its KV,
pinned while they are read                         or blocks in quarantine until no worker writes to them
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from msgspec.structs import replace

from streamserve.contracts.transport import Gate, Landing, TransferError, Transport
from streamserve.engine.block_pool import BlockPool
from streamserve.engine.reservations import take_reservation
from streamserve.engine.sequence import EngineSequence
from streamserve.engine.status import TransferRole
from streamserve.protocol.messages import Pushed, RequestKind
from streamserve.protocol.reports import TransferReport
from streamserve.protocol.transfers import CacheAddress, TransferReservation


@dataclass
class _Sending:
    """A transfer reservation that is being served, of a request of `kind`. `sequence` is None if it was
    removed; then only pushes in flight are waited for. The KV of the first `groups` KV cache groups was
    complete in all pushes. `waited`: whether a request decodes after the transfer. `error`: the transport's
    error, if any."""

    reservation: TransferReservation
    sequence: EngineSequence | None
    kind: RequestKind
    sent_tokens: int
    groups: int
    waited: bool
    in_flight: dict[int, list[int]] = field(default_factory=dict)
    computed_at: float | None = None
    sent: int = 0
    wire_seconds: float = 0.0
    error: str = ""


class Outgoing:
    """The sending side of KV transfers: pushes KV as it is computed, and reports when all of it has
    landed."""

    def __init__(
        self, transport: Transport, pool: BlockPool, block_size: int, clock: Callable[[], float]
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._block_size = block_size
        self._clock = clock
        self._sending: dict[int, _Sending] = {}
        self._closing: list[_Sending] = []
        self._refused: list[Pushed] = []
        self._counts = TransferReport()

    def report(self) -> TransferReport:
        """Return the totals sent so far."""
        return self._counts

    def held_blocks(self) -> list[int]:
        """Return the blocks that are being read; one entry for each push that reads a block."""
        sending = [*self._sending.values(), *self._closing]
        return [block for push in sending for blocks in push.in_flight.values() for block in blocks]

    def sequences(self) -> list[EngineSequence]:
        """Return the sequences whose KV is being sent."""
        return [sending.sequence for sending in self._sending.values() if sending.sequence]

    def grant(self, reservation: TransferReservation, sequence: EngineSequence | None) -> bool:
        """Accept a transfer reservation for `sequence` (None: no sequence matches it), or refuse it. Returns
        whether KV was sent at once."""
        served = [sending.reservation for sending in [*self._sending.values(), *self._closing]]
        if reservation in served:
            return False  # a duplicate: the result for the first one is reported once
        error = ""
        if any(reservation.id == other.id for other in served):
            error = "another reservation has this id"
        elif sequence is None or sequence.id in self._sending:
            error = "this worker does not have the request"
        elif reservation.tokens != len(sequence.tokens) or reservation.start % self._block_size:
            error = f"the reservation is for {reservation.tokens} tokens, not for {len(sequence.tokens)}"
        elif reservation.adapter != sequence.submitted.adapter:
            error = "the reservation is for KV of another LoRA adapter"
        elif not self._fits(reservation):
            error = "the reservation's blocks do not match its tokens: it needs one distinct block for each"
        else:
            try:
                self._transport.check(reservation.to)
            except TransferError as failure:
                error = str(failure)
                self._counts.failed += 1
        if error or sequence is None:
            self._refused.append(Pushed(reservation.request, reservation.attempt, reservation.id, error))
            return False
        self._sending[sequence.id] = _Sending(
            reservation,
            sequence,
            sequence.submitted.kind,
            reservation.start,
            len(sequence.kv.computed),
            sequence.transfer.role is not TransferRole.COPY,
        )
        take_reservation(sequence)
        return self.advance(sequence)

    def _fits(self, reservation: TransferReservation) -> bool:
        """Whether a reservation has the blocks for its tokens, each once, all in the receiver's cache."""
        needed = -(-reservation.tokens // self._block_size) - reservation.start // self._block_size
        inside = all(0 <= block < reservation.to.num_blocks for block in reservation.blocks)
        return (
            reservation.start >= 0
            and inside
            and len(set(reservation.blocks)) == len(reservation.blocks) == needed
        )

    def advance(self, sequence: EngineSequence, upcoming: int = 0) -> bool:
        """Push the sequence's computed and unsent KV, and the KV of the next `upcoming` tokens, which the
        step about to run computes. Only whole blocks are sent, except for the last tokens. Nothing is sent
        while the KV is in the host pool. Returns whether KV was sent."""
        sending = self._sending.get(sequence.id)
        if sending is None or sending.error or not sequence.kv.blocks:
            return False
        reservation, size = sending.reservation, self._block_size
        computed = min(sequence.kv.computed[0] + upcoming, reservation.tokens)
        done = computed == reservation.tokens
        if sequence.kv.computed[0] >= reservation.tokens and sending.computed_at is None:
            sending.computed_at = self._clock()
        first, last = sending.sent_tokens // size, -(-computed // size) if done else computed // size
        if last > first:
            skipped = reservation.start // size
            copies = [(sequence.kv.blocks[i], reservation.blocks[i - skipped]) for i in range(first, last)]
            for block, _ in copies:
                self._pool.share(block)
            job = self._transport.push(reservation.to, copies, upcoming > 0, reservation.id)
            sending.in_flight[job] = [block for block, _ in copies]
            if min(sequence.kv.computed[1:], default=computed) < computed:
                sending.groups = 1  # the draft model has not read all of the tokens
        sending.sent_tokens = computed if done else max(last * size, sending.sent_tokens)
        return last > first

    def abandon(self) -> None:
        """Forget all reservations. To be called after the transport was closed, when no push reads blocks."""
        for block in self.held_blocks():
            self._pool.release([block])
        self._sending, self._closing, self._refused = {}, [], []

    def attach(self, transport: Transport) -> None:
        """Use another transport from now on."""
        self._transport = transport

    def drop(self, sequence: EngineSequence) -> None:
        """Stop sending a sequence's KV. Its reservation is closed once no push is in flight."""
        sending = self._sending.pop(sequence.id, None)
        if sending is not None:
            sending.sequence = None
            self._closing.append(sending)

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to report, now or when pushes have landed."""
        return bool(self._refused or self._closing or any(s.in_flight for s in self._sending.values()))

    def poll(self) -> tuple[list[Pushed], list[tuple[EngineSequence, str]]]:
        """Return the notifications of ended reservations, and the sequences that are no longer needed here,
        each with the error of its transfer."""
        owners = {job: s for s in [*self._sending.values(), *self._closing] for job in s.in_flight}
        for landed in self._transport.landed():
            sending = owners[landed.job]
            self._pool.release(sending.in_flight.pop(landed.job))
            sending.sent += landed.sent
            sending.wire_seconds += landed.seconds
            sending.error = sending.error or landed.error
            counts, kind = self._counts, sending.kind
            counts.sent_bytes += landed.sent
            counts.arriving_bytes += (kind is RequestKind.STREAM_PUSH) * landed.sent
            counts.writeback_bytes += (kind is RequestKind.WRITEBACK) * landed.sent
            counts.wire_seconds += landed.seconds
        closed, self._refused = self._refused, []
        free: list[tuple[EngineSequence, str]] = []
        done = [s for s in self._sending.values() if not s.in_flight and (s.error or _complete(s))]
        for sending in done:
            closed.append(self._closed(sending))
            if sending.sequence is not None:
                free.append((sending.sequence, sending.error))
                del self._sending[sending.sequence.id]
        closed += [self._closed(sending) for sending in self._closing if not sending.in_flight]
        self._closing = [sending for sending in self._closing if sending.in_flight]
        return closed, free

    def _closed(self, sending: _Sending) -> Pushed:
        reservation, since, counts = sending.reservation, sending.computed_at, self._counts
        error = sending.error or ("the request was removed" if sending.sequence is None else "")
        exposed_to_client = since is not None and sending.waited and not error
        exposed = self._clock() - since if since is not None and exposed_to_client else 0.0
        writeback, push = sending.kind is RequestKind.WRITEBACK, sending.kind is RequestKind.STREAM_PUSH
        hidden = 0.0 if writeback else max(0.0, sending.wire_seconds - exposed)
        counts.handed_over += not error and sending.waited
        counts.arriving_copies += not error and push
        counts.writebacks += not error and writeback
        counts.failed += bool(sending.error)
        counts.exposed_seconds += exposed
        counts.hidden_seconds += hidden
        return Pushed(
            reservation.request,
            reservation.attempt,
            reservation.id,
            error,
            sending.sent,
            exposed,
            sending.groups,
            doubtful=bool(sending.error),
        )


def _complete(sending: _Sending) -> bool:
    """Whether all KV has been sent and computed. The last blocks are sent before their step has run."""
    return sending.sent_tokens == sending.reservation.tokens and sending.computed_at is not None


class Incoming:
    """The receiving side of KV transfers: the sequence that waits for each reservation, and the blocks in
    quarantine."""

    def __init__(
        self,
        address: CacheAddress,
        name: str,
        pool: BlockPool,
        block_size: int,
        gate: Gate | None = None,
        landing: Landing | None = None,
    ) -> None:
        self._address = address
        self._gate = gate
        self._landing = landing
        self._name = name
        self._pool = pool
        self._block_size = block_size
        self._numbers = count()
        self._waiting: dict[str, EngineSequence] = {}
        self._quarantine: dict[str, list[int]] = {}
        self._abandoned: list[int] = []
        """Blocks in quarantine from a fleet that this worker has left: no message releases them."""
        self._counts = TransferReport()

    def abandon(self) -> None:
        """Forget all reservations, after their sequences were removed. Writes over the network are refused
        from now on. Workers on this machine may still write, so the blocks stay in quarantine until
        `release_abandoned`."""
        for reservation_id in self._quarantine:
            self._close(reservation_id)
        self._abandoned += [block for blocks in self._quarantine.values() for block in blocks]
        self._quarantine = {}

    def release_abandoned(self) -> None:
        """Release the abandoned blocks, to which no worker writes any more."""
        self._pool.release(self._abandoned)
        self._abandoned = []

    def attach(self, address: CacheAddress, name: str) -> None:
        """Use another address and worker name from now on."""
        self._address, self._name = address, name

    def report(self) -> TransferReport:
        """Return the totals received so far."""
        return replace(self._counts, refused_writes=self._gate.refused if self._gate else 0)

    @property
    def open(self) -> int:
        """Number of reservations whose blocks other workers may write."""
        return len(self._waiting) + len(self._quarantine)

    def held_blocks(self) -> list[int]:
        """Return the blocks in quarantine."""
        return self._abandoned + [block for blocks in self._quarantine.values() for block in blocks]

    def sequences(self) -> list[EngineSequence]:
        """Return the sequences that wait for KV."""
        return list(self._waiting.values())

    def issue(self, sequence: EngineSequence) -> TransferReservation:
        """Return a reservation for a sequence that holds blocks for all its tokens."""
        start = sequence.kv.computed[0]
        id = f"{self._name}/{next(self._numbers)}"
        self._waiting[id] = sequence
        blocks = self._uncached(sequence)
        if self._gate:
            self._gate.open(id, blocks)
        return TransferReservation(
            id=id,
            request=sequence.request,
            attempt=sequence.attempt,
            choices=sequence.choices,
            tokens=len(sequence.tokens),
            start=start,
            blocks=blocks,
            to=self._address,
            adapter=sequence.submitted.adapter,
        )

    def joined(self, reservation_id: str) -> EngineSequence | None:
        """Close a reservation whose KV has landed, and return its sequence; None if it is not open here."""
        self._close(reservation_id)
        sequence = self._waiting.pop(reservation_id, None)
        if sequence is not None:
            if self._landing:
                self._landing.land(self._uncached(sequence))
            counts, tokens, cached = self._counts, len(sequence.tokens), sequence.kv.computed[0]
            if sequence.submitted.kind is not RequestKind.CLIENT:
                counts.received_copies += 1
                counts.copied_tokens += tokens - cached
            else:
                counts.received += 1
                counts.received_tokens += tokens
                counts.hit_tokens += cached
        return sequence

    def withdraw(self, sequence: EngineSequence) -> None:
        """Forget a sequence before its KV has landed. Its uncached blocks stay in quarantine until
        `release`."""
        for reservation_id, other in self._waiting.items():
            if other is sequence:
                own = sequence.kv.blocks[sequence.kv.computed[0] // self._block_size :]
                for block in own:
                    self._pool.share(block)
                self._quarantine[reservation_id] = own
                del self._waiting[reservation_id]
                return

    def release(self, reservation_id: str, doubtful: bool = False) -> EngineSequence | None:
        """End a reservation to whose blocks no worker writes any more, and release its quarantine. With
        `doubtful`, bytes may still be on the network. Returns the sequence that waits for it, if any."""
        self._close(reservation_id, doubtful)
        self._pool.release(self._quarantine.pop(reservation_id, []))
        return self._waiting.pop(reservation_id, None)

    def _uncached(self, sequence: EngineSequence) -> list[int]:
        """Return the blocks of a waiting sequence that the sender writes."""
        first = sequence.kv.computed[0] // self._block_size
        return sequence.kv.blocks[first : -(-len(sequence.tokens) // self._block_size)]

    def _close(self, reservation_id: str, doubtful: bool = False) -> None:
        if self._gate:
            self._address = self._gate.close(reservation_id, doubtful) or self._address
