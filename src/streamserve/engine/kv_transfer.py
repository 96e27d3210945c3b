"""The KV transfer manager: transfer reservations between an engine and other workers, and notifications of
their progress."""

from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import asdict

from streamserve.contracts.plan import TARGET
from streamserve.contracts.transport import Transport
from streamserve.engine.observer import LifecycleEvent, Observer
from streamserve.engine.ports import EnginePorts
from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import EngineSequence
from streamserve.engine.status import SequenceStatus, TransferRole
from streamserve.engine.transport import Incoming, Outgoing
from streamserve.protocol.messages import Deferred, Phase, Pushed, RequestKind, Reserved, TransferUpdate
from streamserve.protocol.reports import TransferReport
from streamserve.protocol.transfers import CacheAddress, Hold, Join, Push, Release


class KVTransferManager:
    """Manages the sequences of `scheduler` whose KV is sent or received. `observer` receives the lifecycle
    events of transfers."""

    def __init__(
        self,
        scheduler: Scheduler,
        outgoing: Outgoing | None,
        incoming: Incoming | None,
        observer: Observer,
    ) -> None:
        self._scheduler = scheduler
        self._outgoing = outgoing
        self._incoming = incoming
        self._observer = observer
        self._updates: list[TransferUpdate] = []
        self._deferred = 0

    @property
    def enabled(self) -> bool:
        """Whether KV may be exchanged with other workers."""
        return self._outgoing is not None or self._incoming is not None

    @property
    def busy(self) -> bool:
        """Whether `take_updates` has something to return, or will have when KV that is being sent has
        landed."""
        return bool(self._updates) or (self._outgoing is not None and self._outgoing.busy)

    def moving(self) -> list[EngineSequence]:
        """Return the sequences whose KV may be in transfer to other workers."""
        if self._outgoing is None:
            return []
        return [
            s
            for s in self._scheduler.sequences.values()
            if s.transfer.role.sends and s.transfer.has_reservation
        ]

    def serves(self, phase: Phase) -> bool:
        """Whether this worker serves requests in this phase."""
        if phase == "both":
            return True
        return (self._incoming if phase == "decode" else self._outgoing) is not None

    def expected(self) -> list[EngineSequence]:
        """Return the sequences that will decode here when their KV has landed."""
        return [s for s in self._incoming.sequences() if s.decodes] if self._incoming else []

    def defer(self, sequences: Iterable[EngineSequence]) -> None:
        """Report the sequences whose reservation is deferred, each sequence once. A step that defers a
        sequence does not pass it over, so no swapped sequence leaves memory to it."""
        for sequence in sequences:
            sequence.passed_over = False
            if not sequence.transfer.deferred:
                sequence.transfer.deferred = True
                self._deferred += 1
                self._updates.append(Deferred(sequence.request, sequence.attempt))

    def handle(self, message: Push | Join | Release | Hold) -> None:
        """Handle a message of the fleet about a transfer reservation."""
        match message:
            case Hold():
                for held in self._scheduler.of(message.request):
                    if held.attempt == message.attempt and held.transfer.role is TransferRole.SENDER:
                        held.transfer.hold = True
            case Push():
                self._push(message)
            case Join():
                self._join(message)
            case Release():
                sequence = (
                    self._incoming.release(message.reservation_id, message.doubtful)
                    if self._incoming
                    else None
                )
                if sequence is not None:
                    self._scheduler.remove(sequence)

    def issue(self) -> None:
        """Issue transfer reservations for the sequences that got blocks for another worker's KV since the
        last call."""
        if self._incoming is not None:
            taken = self._scheduler.take_reserved()
            self._updates += [Reserved(s.request, s.attempt, self._incoming.issue(s)) for s in taken]
            for sequence in taken:
                self._observe("reserved", sequence)

    def advance(self, sequence: EngineSequence, coming: int = 0) -> None:
        """Send the computed and unsent KV of a sequence, and the KV of the next `coming` tokens, which the
        step about to run computes."""
        if self._outgoing and sequence.transfer.role.sends and self._outgoing.advance(sequence, coming):
            self._observe("mid-layer push", sequence)

    def remove(self, sequence: EngineSequence) -> None:
        """Forget a sequence. Blocks that other workers still read or write are kept until they no longer
        do."""
        if self._outgoing and sequence.transfer.role.sends:
            self._outgoing.drop(sequence)
        if self._incoming and sequence.transfer.role is TransferRole.RECEIVER:
            self._incoming.withdraw(sequence)
        self._scheduler.remove(sequence)

    def abandon(self) -> None:
        """Forget all reservations, after all sequences were removed and the transport was closed. Blocks that
        other workers may still write stay in quarantine until `release_abandoned`."""
        if self._outgoing is not None:
            self._outgoing.abandon()
        if self._incoming is not None:
            self._incoming.abandon()
        self._updates = []

    def release_abandoned(self) -> None:
        """End the quarantine of abandoned blocks: no worker writes to them any more."""
        if self._incoming is not None:
            self._incoming.release_abandoned()

    def attach(self, transport: Transport | None, cache: CacheAddress | None, name: str) -> None:
        """Exchange KV in another fleet, in the same directions as before, as a worker with this name."""
        if self._outgoing is not None and transport is not None:
            self._outgoing.attach(transport)
        if self._incoming is not None and cache is not None:
            self._incoming.attach(cache, name)

    def take_updates(self) -> list[TransferUpdate]:
        """Return the notifications since the last call, to be sent after the events so far. Removes the
        sequences whose KV has landed on other workers."""
        if self._outgoing is not None:
            closed, finished = self._outgoing.poll()
            self._updates += closed
            for sequence, error in finished:
                if not error:
                    self._observe("last layer landed", sequence)
            for sequence, _ in finished:
                self._scheduler.remove(sequence)
        updates, self._updates = self._updates, []
        return updates

    def held_blocks(self) -> list[int]:
        """Return the blocks that transfers hold in addition to the blocks of sequences; one entry for each
        reference."""
        return [block for side in (self._outgoing, self._incoming) if side for block in side.held_blocks()]

    def faults(self) -> Iterator[str]:
        """Yield a description of each transfer reservation, issued or received, that contradicts the state of
        its sequence."""
        live = self._scheduler.sequences
        for side in (self._outgoing, self._incoming):
            for sequence in side.sequences() if side else ():
                if live.get(sequence.id) is not sequence:
                    yield f"a transfer reservation is for sequence {sequence.id}, which is gone"
                if side is self._incoming and sequence.status is not SequenceStatus.AWAITING_KV:
                    yield f"sequence {sequence.id} waits for KV, but takes part in steps"

    def report(self) -> TransferReport | None:
        """Return the totals sent and received; None for a worker that exchanges no KV."""
        sides = [asdict(side.report()) for side in (self._outgoing, self._incoming) if side]
        if not sides:
            return None
        totals = {key: sum(side[key] for side in sides) for key in sides[0]}
        return TransferReport(**totals | {"deferred": self._deferred})

    def _observe(self, name: LifecycleEvent, sequence: EngineSequence) -> None:
        """Pass the event on if it concerns a client's request."""
        if sequence.submitted.kind is RequestKind.CLIENT:
            self._observer.on_event(name, sequence.request)

    def _push(self, message: Push) -> None:
        reservation = message.reservation
        if self._outgoing is None:
            error = "this worker does not send KV"
            self._updates.append(Pushed(reservation.request, reservation.attempt, reservation.id, error))
            return
        matching = (
            sequence
            for sequence in self._scheduler.of(reservation.request)
            if sequence.attempt == reservation.attempt and set(sequence.choices) & set(reservation.choices)
        )
        sequence = next(matching, None)
        if self._outgoing.grant(reservation, sequence) and sequence is not None:
            self._observe("mid-layer push", sequence)

    def _join(self, message: Join) -> None:
        """Let a sequence decode here, after the KV of its prompt has landed."""
        sequence = self._incoming.joined(message.reservation_id) if self._incoming else None
        if sequence is None:
            error = "no sequence waits for this reservation"
            self._updates.append(Pushed(message.request, message.attempt, message.reservation_id, error))
            return
        sequence.become(SequenceStatus.RUNNING)
        sequence.transfer.role = TransferRole.LOCAL
        have = sequence.kv.computed[TARGET]
        for group, known in enumerate(sequence.kv.computed[: message.groups]):
            if known >= have:  # the cached prefix, which was not sent, is complete in this group too
                sequence.kv.computed[group] = len(sequence.tokens)
        self._scheduler.tables.register(sequence)
        sequence.choices = tuple(choice for choice in sequence.choices if choice in message.outputs)
        if not sequence.choices:
            self._scheduler.remove(sequence)
            return
        for branch in self._scheduler.fork(sequence):
            branch.tokens += message.outputs[branch.choices[0]][branch.outputs :]
            branch.clock.first_token_at = message.began.get(branch.choices[0])
            if not branch.pending:  # its first token was held back: drop the last KV, to sample it here
                self._scheduler.truncate(branch, len(branch.tokens) - 1)


def make_transfers(
    scheduler: Scheduler, ports: EnginePorts, clock: Callable[[], float], observer: Observer
) -> KVTransferManager:
    """Return the KV transfer manager, with the directions (sending, receiving) that the ports allow."""
    pool, block_size = scheduler.tables.pool, scheduler.config.block_size
    outgoing = Outgoing(ports.transport, pool, block_size, clock) if ports.transport else None
    incoming = None
    if ports.cache:
        incoming = Incoming(ports.cache, ports.name, pool, block_size, ports.gate, ports.landing)
    if ports.transport or ports.cache or ports.reports_prefixes:
        pool.track_changes()
    return KVTransferManager(scheduler, outgoing, incoming, observer)
