"""KV transfers between workers: what an engine requires of a transport, and of memory that others write."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streamserve.protocol.transfers import CacheAddress


class TransferError(Exception):
    """KV cannot be written to that address; the message says why."""


@dataclass(frozen=True)
class Landed:
    """A push has ended: `sent` bytes have arrived, or with an `error` perhaps not all of them. It writes no
    more in either case. It was on the wire for `seconds`."""

    job: int
    sent: int
    error: str = ""
    seconds: float = field(default=0.0, compare=False)


class Transport(Protocol):
    """Writes blocks into other workers' pools (transfer/), or simulates it (simulate/)."""

    def check(self, to: CacheAddress) -> None:
        """Raise TransferError unless blocks can be written to that address."""
        ...

    def push(
        self,
        to: CacheAddress,
        copies: Sequence[tuple[int, int]],
        upcoming: bool = False,
        reservation: str = "",
    ) -> int:
        """Start writing blocks (own block, block there) in all KV cache groups; returns the job's number.
        With `upcoming` the step about to run fills the target's KV: each layer is written as soon as it is
        computed. The receiver may check the `reservation` that permits it."""
        ...

    def landed(self) -> list[Landed]:
        """Return the jobs that have ended since the last call."""
        ...


class Gate(Protocol):
    """Which of a worker's own blocks other workers may write (transfer/gate.py)."""

    refused: int

    def open(self, reservation: str, blocks: Iterable[int]) -> None:
        """Let these blocks be written for a reservation."""
        ...

    def close(self, reservation: str, doubtful: bool = False) -> CacheAddress | None:
        """Let nothing more be written for a reservation, nor what may still be on the way (`doubtful`).
        Returns the address of the memory if it has another one from now on."""
        ...


class Landing(Protocol):
    """Memory where other workers write KV that steps do not read (execution/cuda/landing.py)."""

    def take(self, blocks: Sequence[int]) -> None:
        """Copy these blocks to where steps read them, before any later step does."""
        ...
