"""Lines that a service prints about itself while it runs."""

import logging
import os

import typer

_log = logging.getLogger(__name__)


def announce(text: str) -> None:
    """Print a text. If standard output cannot be written, because its disk is full or its reader is gone, the
    service goes on: this is logged, and nothing more is printed."""
    try:
        typer.echo(text)
    except OSError as error:
        _log.warning("standard output cannot be written (%s): nothing more is printed", error.strerror)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # what is left in the buffer would fail again at the end of the process
        os.close(null)
