"""`streamserve version`: print the version."""

import typer

from streamserve import __version__


def version() -> None:
    """Print the version."""
    typer.echo(__version__)
