"""One side of a session between a head and an agent, without I/O: each packet is delivered once and in order,
whatever a connection loses.

    send   ──▶ Packet 1, 2, 3 …  each is kept until the other side has received it
    accept ◀── Packet 1, 2, 4    after a gap, 4 is dropped; the next Alive shows the gap: 3 and 4 are resent

A connection loses packets only at its end. An Alive arrives after the packets that were sent before it, so it
shows for certain whether some of them were lost.
"""

from collections import deque

from streamserve.protocol.cluster import Alive, Packet

MAX_KEPT_BYTES = 256 << 20
MAX_KEPT = 1 << 17
"""Maximum number and bytes of packets that are kept until the other side acknowledges them: above it, the
session ends."""


class SessionError(Exception):
    """The session cannot continue: the other side does not acknowledge, or makes an impossible claim."""


class PacketSession:
    """The packets of one session in both directions."""

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0
        self.resent = 0
        self._kept: deque[Packet] = deque()
        self._kept_bytes = 0

    def send(self, body: bytes) -> Packet:
        """Number a message, and keep it until it is acknowledged. Raises SessionError if too much is kept."""
        if len(self._kept) >= MAX_KEPT or self._kept_bytes + len(body) > MAX_KEPT_BYTES:
            raise SessionError(f"{len(self._kept)} messages were not acknowledged")
        self.sent += 1
        packet = Packet(self.sent, body)
        self._kept.append(packet)
        self._kept_bytes += len(body)
        return packet

    def accept(self, packet: Packet) -> bytes | None:
        """Return the body of the next packet; None if it was received before, or if it follows a gap."""
        if packet.number != self.received + 1:
            return None
        self.received += 1
        return packet.body

    def acknowledge(self, received: int) -> None:
        """Process the number of packets that the other side has received. Raises SessionError if the number
        is impossible."""
        if received > self.sent or received < self.sent - len(self._kept):
            raise SessionError(f"{received} messages were acknowledged, of {self.sent} that were sent")
        while self._kept and self._kept[0].number <= received:
            self._kept_bytes -= len(self._kept.popleft().body)

    def answer(self, alive: Alive) -> list[Packet]:
        """Process the other side's Alive; return the packets to send again. Raises SessionError as
        `acknowledge` does."""
        self.acknowledge(alive.received)
        if not alive.missing:
            return []
        self.resent += len(self._kept)
        return list(self._kept)

    def lacks(self, alive: Alive) -> bool:
        """Return whether packets that were sent before this Alive were lost."""
        return self.received < alive.sent
