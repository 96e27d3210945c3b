"""The lease of a worker's process: until when it may run, as its parent writes it to its standard input."""

import struct

LEASE = struct.Struct("<d")
"""One number: a time of the clock that all processes of a machine share (time.monotonic)."""


class Lease:
    """The end of a lease that was written last, from the bytes that have arrived so far; None before the
    first. The next head's may be shorter."""

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
        """Return whether it has ended."""
        return self.until is not None and now > self.until
