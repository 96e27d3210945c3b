"""The signals that ask a server to stop, and the exit status of what one interrupted."""

import signal

INTERRUPTED = 130
"""The exit status of what Ctrl-C ended, as shells give it."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM, and SIGHUP unless it is ignored (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) + (() if ignored else (signal.SIGHUP,))
