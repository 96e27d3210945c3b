"""Python runs this when it starts, where its folder is in PYTHONPATH: in the workers of test_moments.py.

At the moment that TEST_MOMENT names, for the TEST_MOMENT_NUMBER-th time, a worker writes `here` into the
folder TEST_MOMENT_FOLDER, and goes no further until the test has written `go`. Only the first to come does.
"""

import os
import time
from pathlib import Path

folder = os.environ.get("TEST_MOMENT_FOLDER")
if folder:
    from streamserve.engine import watch

    here, go = Path(folder, "here"), Path(folder, "go")
    left = int(os.environ["TEST_MOMENT_NUMBER"])

    def moment(self: watch.Unwatched, name: watch.Moment, request: str = "") -> None:
        """Wait if this is the moment."""
        global left
        left -= name == os.environ["TEST_MOMENT"]
        if left or here.exists():
            return
        left = -1
        here.touch()
        while not go.exists() and here.exists():
            time.sleep(0.002)

    watch.Unwatched.moment = moment  # type: ignore[method-assign]
