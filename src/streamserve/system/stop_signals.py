"""The signals that ask a server to stop, and the exit status after an interrupt."""

import signal

INTERRUPTED = 130
"""The exit status after Ctrl-C, as in shells."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGINT, SIGTERM, and SIGHUP unless it is ignored (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) + (() if ignored else (signal.SIGHUP,))
