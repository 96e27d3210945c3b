"""Rate limit for log lines that clients can cause: one line of each kind in a number of seconds, with the
number of lines left out."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

SECONDS = 1.0


class Throttle(logging.Filter):
    """Passes one record of each kind in `seconds`. For loggers whose lines are caused by clients, and whose
    messages are constants with arguments: the message identifies the kind. For the first `apart` different
    lines, the arguments identify the kind as well."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, seconds: float = SECONDS, apart: int = 0
    ) -> None:
        super().__init__()
        self._clock = clock
        self._seconds = seconds
        self._apart = apart
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log `record`. If so, its message is extended by the number of records of its kind
        that were left out since its last record."""
        kind, now = self._kind(record), self._clock()
        last, left_out = self._kinds.get(kind, (-inf, 0))
        if now - last < self._seconds:
            self._kinds[kind] = last, left_out + 1
            return False
        self._kinds[kind] = now, 0
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more like this left out)", ()
        return True

    def _kind(self, record: logging.LogRecord) -> tuple[str, str]:
        whole = record.name, record.getMessage()
        return (
            whole
            if whole in self._kinds or len(self._kinds) < self._apart
            else (record.name, str(record.msg))
        )


@contextmanager
def throttled(*loggers: str) -> Iterator[None]:
    """Throttle the lines of these loggers within the block."""
    throttle = Throttle()
    for name in loggers:
        logging.getLogger(name).addFilter(throttle)
    try:
        yield
    finally:
        for name in loggers:
            logging.getLogger(name).removeFilter(throttle)
