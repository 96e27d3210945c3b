"""What ends the processes that serve all tests of this one, after its last test."""

from collections.abc import Callable

CALLS: list[Callable[[], None]] = []
"""Called at the end. Whoever starts such a process adds to it, so that tests without one import nothing."""
