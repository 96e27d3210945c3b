"""Functions that end the processes shared by all tests of this process, after its last test."""

from collections.abc import Callable

CALLS: list[Callable[[], None]] = []
"""Functions that are called at the end. The code that starts such a process adds one, so tests without it
import nothing."""
