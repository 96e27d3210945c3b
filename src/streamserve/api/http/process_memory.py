"""How the API process treats its own memory: what is freed goes back, and collections stay short."""

import ctypes
import gc

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Of glibc's mallopt."""

_MMAP_ABOVE = 256 << 10
"""Larger blocks are mapped one by one, and so given back to the system when they are freed. glibc would raise
this to 32 MB after the first large body, and keep the holes."""

_ARENAS = 2
"""One for the event loop, one for the side threads."""

_COLLECT_AFTER = 20_000
"""Objects made before the youngest are looked through; Python's 700 makes a large request pay for hundreds of
passes."""


def bound_allocator() -> None:
    """Have freed memory go back to the system, where the C library can be told so."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_ABOVE)
    mallopt(_M_ARENA_MAX, _ARENAS)


def freeze_started() -> None:
    """Leave everything that the start made out of collections: a full one, which stops the event loop, then
    takes as long as requests have objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 10, 10)
