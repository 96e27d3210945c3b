"""The lease of a worker's process: the time until which it may run. Its parent writes it to its standard
input."""

import struct

LEASE = struct.Struct("<d")
"""One number: a time of the clock that all processes of a machine share (time.monotonic)."""


class Lease:
    """The end of the latest lease that has arrived completely; None before the first. A next head may give a
    shorter lease."""

    def __init__(self) -> None:
        self.until: float | None = None
        self._rest = b""

    def read(self, data: bytes) -> None:
        """Process bytes of standard input, in any pieces."""
        data = self._rest + data
        whole = len(data) // LEASE.size * LEASE.size
        for (until,) in LEASE.iter_unpack(data[:whole]):
            self.until = until
        self._rest = data[whole:]

    def is_over(self, now: float) -> bool:
        return self.until is not None and now > self.until
