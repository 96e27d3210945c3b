"""Python runs this when it starts, where its folder is in PYTHONPATH: in the workers of tests that lose some
at a lifecycle event.

The file `round` in the folder TEST_EVENT_FOLDER has the number of a round, a count and the name of the event.
The first worker that reaches it that many times in the round writes the file `reached`, and blocks
until the test has written the file `resume`. No worker blocks while `resume` exists."""

import os
import time
from pathlib import Path

folder = os.environ.get("TEST_EVENT_FOLDER")
if folder:
    from streamserve.engine import observer

    reached, resume, round_file = (Path(folder, name) for name in ("reached", "resume", "round"))
    counted: dict[str, int] = {}

    def on_event(self: observer.NoObserver, name: observer.LifecycleEvent, request: str = "") -> None:
        """Block if this is the event."""
        if resume.exists():
            return
        round_number, count, event = round_file.read_text().split(maxsplit=2)
        if name != event:
            return
        counted[round_number] = counted.get(round_number, 0) + 1
        if counted[round_number] != int(count) or reached.exists():
            return
        reached.touch()
        while not resume.exists():
            time.sleep(0.002)

    observer.NoObserver.on_event = on_event  # type: ignore[method-assign]
