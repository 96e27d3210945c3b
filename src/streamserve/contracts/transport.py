"""KV transfers between workers: what an engine requires of a transport, and of memory that others write."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streamserve.protocol.transfers import CacheAddress


class TransferError(Exception):
    """KV cannot be written to an address; the message says why."""


@dataclass(frozen=True)
class Landed:
    """The end of a push: `sent` bytes have arrived, or with an `error` perhaps fewer. The push writes nothing
    more in either case. It was on the wire for `seconds`."""

    job: int
    sent: int
    error: str = ""
    seconds: float = field(default=0.0, compare=False)


class Transport(Protocol):
    """Writes blocks into other workers' KV pools (transfer/), or simulates that (simulate/)."""

    def check(self, to: CacheAddress) -> None:
        """Raise TransferError unless blocks can be written to the address `to`."""

    def push(
        self,
        to: CacheAddress,
        copies: Sequence[tuple[int, int]],
        upcoming: bool = False,
        reservation: str = "",
    ) -> int:
        """Start writing the blocks of `copies` (own block, receiver's block), in all KV cache groups; returns
        the number of the job. With `upcoming` the step about to run computes the target's KV: each layer is
        written when it is computed. The receiver may check that `reservation` permits the writes."""

    def landed(self) -> list[Landed]:
        """Return the jobs that have ended since the last call."""


class Gate(Protocol):
    """The permission for other workers to write a worker's blocks (transfer/gate.py)."""

    refused: int

    def open(self, reservation: str, blocks: Iterable[int]) -> None:
        """Permit writes to these blocks for a reservation."""

    def close(self, reservation: str, doubtful: bool = False) -> CacheAddress | None:
        """Refuse further writes for a reservation. With `doubtful`, bytes that are still on the network are
        refused, too. Some transports can refuse them only under a new address of the memory; then it is
        returned."""


class Landing(Protocol):
    """Memory that other workers write KV to and that steps do not read (backends/cuda/landing.py)."""

    def land(self, blocks: Sequence[int]) -> None:
        """Copy these blocks to the memory that steps read, before any later step reads them."""
