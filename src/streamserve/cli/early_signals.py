"""Handlers for signals that arrive before a command installs its handlers: they end the process at once, and
leave no runtime folder."""

import os
import signal
from types import FrameType

from streamserve.system.runtime_folder import remove_own
from streamserve.system.stop_signals import stop_signals


def end_on_signals() -> None:
    """Until other handlers replace these, let SIGTERM and SIGHUP end this process as usual, but first remove
    its runtime folder. The handlers raise no exception: it could interrupt the creation of a folder."""

    def end(number: int, frame: FrameType | None) -> None:
        remove_own()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in stop_signals():
        if number != signal.SIGINT:  # Python raises KeyboardInterrupt
            signal.signal(number, end)
