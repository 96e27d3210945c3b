"""Python runs this when it starts, where its folder is in PYTHONPATH: in the workers of test_moments.py.

The file `number` in the folder TEST_MOMENT_FOLDER has the number of a round, and a count: who comes to the
moment that TEST_MOMENT names for so many times in that round writes `here` into that folder, and goes no
further until the test has written `go`. Only the first to come does; while there is `go`, nobody does."""

import os
import time
from pathlib import Path

folder = os.environ.get("TEST_MOMENT_FOLDER")
if folder:
    from streamserve.engine import observer as watch

    here, go, number = (Path(folder, name) for name in ("here", "go", "number"))
    counted: dict[str, int] = {}

    def moment(self: watch.NoObserver, name: watch.LifecycleEvent, request: str = "") -> None:
        """Wait if this is the moment."""
        if name != os.environ["TEST_MOMENT"] or go.exists():
            return
        turn, wanted = number.read_text().split()
        counted[turn] = counted.get(turn, 0) + 1
        if counted[turn] != int(wanted) or here.exists():
            return
        here.touch()
        while not go.exists():
            time.sleep(0.002)

    watch.NoObserver.moment = moment  # type: ignore[method-assign]
