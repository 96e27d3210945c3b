"""Python runs this module when it starts, if its folder is in PYTHONPATH: in the workers of tests that lose
workers at a lifecycle event.

The file `round` in the folder TEST_EVENT_FOLDER has the number of a round, a count and the name of the event.
The first worker that reaches the event for the count-th time in the round writes the file `reached`, with its
name, and blocks until the test has written the file `resume`. No worker blocks while `resume` exists.

With TEST_LATE_WRITES a worker does not end when its lease is over, and its link is slow: no worker sends
parts of a push in a round before a prefill worker has reached the event, and that worker sends none before
`resume`. Decode workers, which write answers back, do not block."""

import os
import sys
import time
from pathlib import Path
from typing import Any

folder = os.environ.get("TEST_EVENT_FOLDER")
if folder:
    from streamserve.engine import observer

    reached, resume, round_file = (Path(folder, name) for name in ("reached", "resume", "round"))
    counted: dict[str, int] = {}
    sends: list[Any] = []

    def on_event(self: observer.Observer, name: observer.LifecycleEvent, request: str = "") -> None:
        """Block if the test waits for this event."""
        if resume.exists():
            return
        if late:
            slow_down()
        round_number, count, event = round_file.read_text().split(maxsplit=2)
        if name != event or (late and not worker().startswith("prefill")):
            return
        counted[round_number] = counted.get(round_number, 0) + 1
        if counted[round_number] != int(count) or reached.exists():
            return
        if not claim():
            return
        while not resume.exists():
            time.sleep(0.002)

    def claim() -> bool:
        """Write the file `reached` atomically; return False if another worker has written it."""
        part = reached.with_suffix(f".{os.getpid()}")
        part.write_text(worker(), encoding="utf-8")
        try:
            reached.hardlink_to(part)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True

    def worker() -> str:
        """Return the name of this worker."""
        return sys.argv[-1].partition("/")[0]

    def slow_down() -> None:
        """Make this worker's link slow, from its first event on."""
        from streamserve.transfer.network import NetworkTransport

        if not sends:
            sends.append(NetworkTransport._send)
            NetworkTransport._send = slow_send  # type: ignore[method-assign]

    def slow_send(transport: Any, pushes: list[Any], *rest: Any) -> float:
        """Send the writes that are permitted at this time."""
        if resume.exists() or (reached.exists() and reached.read_text() != worker()):
            wire_free: float = sends[0](transport, pushes, *rest)
            return wire_free
        for push in pushes:
            push.moved_at = time.monotonic()
        return 0.0

    observer.Observer.on_event = on_event  # type: ignore[method-assign]
    late = "TEST_LATE_WRITES" in os.environ
    if late:
        from streamserve.protocol.lease import Lease

        Lease.is_over = lambda self, now: False  # type: ignore[method-assign]
