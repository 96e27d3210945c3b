"""The `streamserve` command, also as `python -m streamserve`."""

import os
import signal

from streamserve.protocol.stop_signals import INTERRUPTED


def main() -> None:
    """Run the command. Imports take a moment: Ctrl-C during them ends the process without a traceback."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so in a script's background
    if heeded:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    from streamserve.cli.main import main as run

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
