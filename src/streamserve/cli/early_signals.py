"""Signals before a command handles them itself end the process at once, and leave no runtime folder."""

import os
import signal
from types import FrameType

from streamserve.system.runtime_folder import remove_own
from streamserve.system.stop_signals import stop_signals


def end_on_signals() -> None:
    """End this process by SIGTERM and SIGHUP as usual, but remove its runtime folder before, until other
    handlers replace these. No exception is raised: it could come while a folder is being made."""

    def end(number: int, frame: FrameType | None) -> None:
        remove_own()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in stop_signals():
        if number != signal.SIGINT:  # Python raises KeyboardInterrupt
            signal.signal(number, end)
