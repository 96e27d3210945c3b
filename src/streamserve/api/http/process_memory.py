"""Settings of the API process: return freed memory to the system, limit the pauses of the event loop."""

import ctypes
import gc
import sys

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Parameters of glibc's mallopt."""

_MMAP_ABOVE = 256 << 10
"""Larger blocks are mapped individually, and so returned to the system when they are freed. glibc would raise
this threshold to 32 MB after the first large body, and keep the fragmented heap."""

_ARENAS = 2
"""One for the event loop, one for the side threads."""

_COLLECT_AFTER = 20_000
"""Allocations before the youngest generation is collected; Python's default of 700 makes a large request
cause hundreds of collections."""


_SWITCH_SECONDS = 0.001
"""Time for which a side thread that computes in Python may hold the interpreter while the event loop waits
for it, at each of the several wake-ups that a request costs; Python's default is 5 ms."""


def bound_switching() -> None:
    """Let the event loop run soon while side threads compute."""
    sys.setswitchinterval(_SWITCH_SECONDS)


def bound_allocator() -> None:
    """Make freed memory return to the system, if the C library supports it."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_ABOVE)
    mallopt(_M_ARENA_MAX, _ARENAS)


def freeze_started() -> None:
    """Exclude all objects created at startup from garbage collection.

    A full collection stops the event loop; it then takes time in proportion to the objects of requests only.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 10, 10)
