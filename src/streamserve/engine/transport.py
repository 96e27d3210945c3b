"""KV on its way between workers: what one sends, what the other holds blocks for.

who computed it                                     who is to have it
Outgoing: sequence → ticket, blocks pinned while    Incoming: ticket → sequence that waits for its KV,
they are read                                       or blocks in quarantine until nobody writes to them
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from msgspec.structs import replace

from streamserve.engine.block_pool import BlockPool
from streamserve.engine.sequence import Sequence as Running
from streamserve.protocol.messages import Pushed
from streamserve.protocol.reports import TransferReport
from streamserve.protocol.tickets import CacheAddress, Ticket


class TransferError(Exception):
    """KV cannot be written there, and why."""


@dataclass(frozen=True)
class Landed:
    """A push has ended: `sent` bytes have arrived, or with an `error` perhaps not all of them. It writes no
    more in either case. It was on the wire for so many `seconds`."""

    job: int
    sent: int
    error: str = ""
    seconds: float = field(default=0.0, compare=False)


class Transport(Protocol):
    """Writes blocks into other workers' pools (transfer/) or pretends to (simulate/)."""

    def check(self, to: CacheAddress) -> None:
        """Raises TransferError unless blocks can be written there."""
        ...

    def push(self, to: CacheAddress, copies: Sequence[tuple[int, int]], coming: bool = False) -> int:
        """Start writing blocks (own block, block there) in all planes; returns the job's number. With
        `coming` the step about to run fills the target's: each layer is written as soon as it is there."""
        ...

    def landed(self) -> list[Landed]:
        """The jobs that have ended since the last call."""
        ...


@dataclass
class _Sending:
    """A ticket being served. `sequence` is None once it is gone: what is under way is waited for. `planes`
    are complete in all that was sent; `waited`: whether somebody is to decode behind it. `error`: of the
    wire."""

    ticket: Ticket
    sequence: Running | None
    sent_tokens: int
    planes: int
    waited: bool
    flying: dict[int, list[int]] = field(default_factory=dict)
    computed_at: float | None = None
    sent: int = 0
    error: str = ""


class Outgoing:
    """The sending half: pushes what is computed as it is computed, tells when all has landed."""

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
        """What went out so far."""
        return self._counts

    def held_blocks(self) -> list[int]:
        """Blocks that are being read, once for each push."""
        sending = [*self._sending.values(), *self._closing]
        return [block for one in sending for blocks in one.flying.values() for block in blocks]

    def sequences(self) -> list[Running]:
        """The sequences whose KV goes out."""
        return [sending.sequence for sending in self._sending.values() if sending.sequence]

    def grant(self, ticket: Ticket, sequence: Running | None) -> bool:
        """A ticket came; `sequence` is who it is for, None if nobody (any more). Returns whether anything
        was sent at once."""
        served = [sending.ticket for sending in [*self._sending.values(), *self._closing]]
        if ticket in served:
            return False  # the same again: what is said of the first holds for it
        error = ""
        if any(ticket.id == other.id for other in served):
            error = "another ticket has this name"
        elif sequence is None or sequence.id in self._sending:
            error = "the request is not here"
        elif ticket.tokens != len(sequence.tokens) or ticket.have % self._block_size:
            error = f"the ticket is for {ticket.tokens} tokens, not for {len(sequence.tokens)}"
        elif not self._fits(ticket):
            error = "the ticket's blocks are not one of its cache for each of its tokens' blocks"
        else:
            try:
                self._transport.check(ticket.to)
            except TransferError as failure:
                error = str(failure)
                self._counts = replace(self._counts, failed=self._counts.failed + 1)
        if error or sequence is None:
            self._refused.append(Pushed(ticket.request, ticket.attempt, ticket.id, error))
            return False
        self._sending[sequence.id] = _Sending(
            ticket, sequence, ticket.have, len(sequence.computed), not sequence.returned
        )
        sequence.granted = True
        if sequence.held and not sequence.running:  # its blocks were taken while it waited: compute it again
            sequence.held, sequence.stale = False, True
        return self.advance(sequence)

    def _fits(self, ticket: Ticket) -> bool:
        """Whether a ticket's blocks are as many as its tokens need, each once, all in its cache."""
        needed = -(-ticket.tokens // self._block_size) - ticket.have // self._block_size
        inside = all(0 <= block < ticket.to.num_blocks for block in ticket.blocks)
        return ticket.have >= 0 and inside and len(set(ticket.blocks)) == len(ticket.blocks) == needed

    def advance(self, sequence: Running, coming: int = 0) -> bool:
        """More of the sequence has KV, or will have with the step about to run, which computes its next
        `coming` tokens: whole blocks go out, and at the end what is left. Nothing while its KV is in the host
        pool: it will be back before more is computed. Returns whether anything was sent."""
        sending = self._sending.get(sequence.id)
        if sending is None or sending.error or not sequence.running:
            return False
        ticket, size = sending.ticket, self._block_size
        computed = min(sequence.computed[0] + coming, ticket.tokens)
        done = computed == ticket.tokens
        if sequence.computed[0] >= ticket.tokens and sending.computed_at is None:
            sending.computed_at = self._clock()
        first, last = sending.sent_tokens // size, -(-computed // size) if done else computed // size
        if last > first:
            skipped = ticket.have // size
            copies = [(sequence.blocks[i], ticket.blocks[i - skipped]) for i in range(first, last)]
            for block, _ in copies:
                self._pool.share(block)
            job = self._transport.push(ticket.to, copies, coming > 0)
            sending.flying[job] = [block for block, _ in copies]
            if min(sequence.computed[1:], default=computed) < computed:
                sending.planes = 1  # a draft model has not read all of it
        sending.sent_tokens = computed if done else max(last * size, sending.sent_tokens)
        return last > first

    def drop(self, sequence: Running) -> None:
        """The sequence goes: nothing more is sent, and its ticket is closed once nothing is under way."""
        sending = self._sending.pop(sequence.id, None)
        if sending is not None:
            sending.sequence = None
            self._closing.append(sending)

    @property
    def busy(self) -> bool:
        """Whether anything is under way that `poll` will tell of."""
        return bool(self._refused or self._closing or any(s.flying for s in self._sending.values()))

    def poll(self) -> tuple[list[Pushed], list[Running]]:
        """What to tell of tickets that are done with, and the sequences that are no longer needed here."""
        owners = {job: s for s in [*self._sending.values(), *self._closing] for job in s.flying}
        for landed in self._transport.landed():
            sending = owners[landed.job]
            self._pool.release(sending.flying.pop(landed.job))
            sending.sent += landed.sent
            sending.error = sending.error or landed.error
            counts = self._counts
            self._counts = replace(
                counts,
                sent_bytes=counts.sent_bytes + landed.sent,
                wire_seconds=counts.wire_seconds + landed.seconds,
            )
        told, self._refused = self._refused, []
        free: list[Running] = []
        over = [s for s in self._sending.values() if not s.flying and (s.error or _complete(s))]
        for sending in over:
            told.append(self._told(sending))
            if sending.sequence is not None:
                free.append(sending.sequence)
                del self._sending[sending.sequence.id]
        told += [self._told(sending) for sending in self._closing if not sending.flying]
        self._closing = [sending for sending in self._closing if sending.flying]
        return told, free

    def _told(self, sending: _Sending) -> Pushed:
        ticket, since, counts = sending.ticket, sending.computed_at, self._counts
        error = sending.error or ("the request went away" if sending.sequence is None else "")
        late = since is not None and sending.waited and not error
        exposed = self._clock() - since if since is not None and late else 0.0
        self._counts = replace(
            counts,
            handed_over=counts.handed_over + (not error),
            failed=counts.failed + bool(sending.error),
            exposed_seconds=counts.exposed_seconds + exposed,
        )
        return Pushed(ticket.request, ticket.attempt, ticket.id, error, sending.sent, exposed, sending.planes)


def _complete(sending: _Sending) -> bool:
    """Whether all has been sent, and was computed: the last of it may have left before."""
    return sending.sent_tokens == sending.ticket.tokens and sending.computed_at is not None


class Incoming:
    """The receiving half: who waits for which ticket, and which blocks nobody may have yet."""

    def __init__(self, address: CacheAddress, name: str, pool: BlockPool, block_size: int) -> None:
        self._address = address
        self._name = name
        self._pool = pool
        self._block_size = block_size
        self._numbers = count()
        self._waiting: dict[str, Running] = {}
        self._quarantine: dict[str, list[int]] = {}
        self._counts = TransferReport()

    def report(self) -> TransferReport:
        """What came in so far."""
        return self._counts

    @property
    def open(self) -> int:
        """Tickets that somebody may write to."""
        return len(self._waiting) + len(self._quarantine)

    def held_blocks(self) -> list[int]:
        """Blocks in quarantine."""
        return [block for blocks in self._quarantine.values() for block in blocks]

    def sequences(self) -> list[Running]:
        """The sequences that wait for KV."""
        return list(self._waiting.values())

    def issue(self, sequence: Running) -> Ticket:
        """A ticket for a sequence that holds blocks for all its tokens."""
        have = sequence.computed[0]
        id = f"{self._name}/{next(self._numbers)}"
        self._waiting[id] = sequence
        last = -(-len(sequence.tokens) // self._block_size)
        return Ticket(
            id=id,
            request=sequence.request,
            attempt=sequence.attempt,
            choices=sequence.choices,
            tokens=len(sequence.tokens),
            have=have,
            blocks=sequence.blocks[have // self._block_size : last],
            to=self._address,
        )

    def joined(self, ticket: str) -> Running | None:
        """Whose KV has landed; None for a ticket that is not open here."""
        sequence = self._waiting.pop(ticket, None)
        if sequence is not None:
            counts = self._counts
            self._counts = replace(
                counts,
                received=counts.received + 1,
                received_tokens=counts.received_tokens + len(sequence.tokens),
                hit_tokens=counts.hit_tokens + sequence.computed[0],
            )
        return sequence

    def withdraw(self, sequence: Running) -> None:
        """The sequence goes before its KV came: its own blocks are kept from others until `release`."""
        for ticket, other in self._waiting.items():
            if other is sequence:
                own = sequence.blocks[sequence.computed[0] // self._block_size :]
                for block in own:
                    self._pool.share(block)
                self._quarantine[ticket] = own
                del self._waiting[ticket]
                return

    def release(self, ticket: str) -> Running | None:
        """Nobody writes to the ticket any more. Returns the sequence that still waits for it, if one does."""
        self._pool.release(self._quarantine.pop(ticket, []))
        return self._waiting.pop(ticket, None)
