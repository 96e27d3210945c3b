"""The `streamserve` command, also run as `python -m streamserve`."""

import os
import signal
import sys

from streamserve.system.stop_signals import INTERRUPTED


def main() -> None:
    """Run the command. Its imports take a moment: Ctrl-C during them ends the process without a traceback."""
    open_standard_streams()
    # Shells ignore SIGINT in background jobs.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    from streamserve.cli.main import main as run

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def open_standard_streams() -> None:
    """Open /dev/null as each standard stream that is closed: some services start programs without them.

    Otherwise the next opened file would get the descriptor of the closed stream, and printed text would be
    written to that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    main()
