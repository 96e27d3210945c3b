"""`streamserve version` and `streamserve --version`: print the version."""

import typer

from streamserve import __version__


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def show(asked: bool) -> None:
    """Print the version and exit if `asked`. Raises typer.Exit then."""
    if asked:
        version()
        raise typer.Exit()
