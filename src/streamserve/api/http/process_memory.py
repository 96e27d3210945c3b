"""Settings of the API process that return freed memory to the system, and limit pauses of the event loop."""

import ctypes
import gc
import sys

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Parameters of glibc's mallopt."""

_MMAP_ABOVE = 256 << 10
"""Size in bytes above which a block is mapped individually, so that it returns to the system when it is
freed. glibc would raise this threshold to 32 MB after the first large body, and keep the fragmented heap."""

_ARENAS = 2
"""Number of glibc's arenas: one for the event loop, one for the side threads."""

_COLLECT_AFTER = 20_000
"""Allocations before the youngest generation is collected. With Python's default of 700, a large request
causes hundreds of collections."""


_SWITCH_SECONDS = 0.001
"""Seconds for which a side thread that computes in Python may hold the interpreter while the event loop waits
for it. The event loop may wait at each of the several wake-ups of a request. Python's default is 5 ms."""


def bound_switching() -> None:
    """Bound the time for which side threads delay the event loop."""
    sys.setswitchinterval(_SWITCH_SECONDS)


def bound_allocator() -> None:
    """Make freed memory return to the system, if the C library is glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_ABOVE)
    mallopt(_M_ARENA_MAX, _ARENAS)


def freeze_started() -> None:
    """Exclude all objects that exist now, at the end of startup, from garbage collection.

    A full collection stops the event loop. After this call, its duration depends only on the objects that
    requests create.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 10, 10)
