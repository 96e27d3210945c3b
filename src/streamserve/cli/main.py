"""The command line: the app, composed of its commands. Each command is in a separate file.

A command imports the modules that it needs when it runs, so that `--help` and usage errors are quick. Exit
status 2 means an invalid setting or checkpoint, 130 an interrupt by Ctrl-C.
"""

import asyncio
import contextlib
import io
import os
import sys
from typing import Annotated

import typer

from streamserve.cli.chat import chat
from streamserve.cli.command import CheckedCommand
from streamserve.cli.doctor import doctor
from streamserve.cli.draft import draft
from streamserve.cli.early_signals import end_on_signals
from streamserve.cli.flags import exit_on_error
from streamserve.cli.generate import generate
from streamserve.cli.keys import keys
from streamserve.cli.profile import profile
from streamserve.cli.serve import serve
from streamserve.cli.version import show, version
from streamserve.extras.batches.command import batch
from streamserve.extras.bench.cli import bench
from streamserve.extras.cluster.command import worker
from streamserve.extras.models.command import models
from streamserve.settings.options import SettingsError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", is_eager=True, callback=show)
    ] = False,
) -> None:
    """Serve Llama-family models with OpenAI's API, or run them in the terminal."""


for command in (serve, generate, chat, batch, profile, draft, worker, doctor, version):
    app.command(cls=CheckedCommand)(command)
app.add_typer(models, name="models")
app.add_typer(keys, name="keys")
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the `streamserve` command."""
    end_on_signals()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the locale's encoding may lack characters of a text
    with exit_on_error(), contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        check_folder()
        app()


def check_folder() -> None:
    """Raise SettingsError if the current folder was deleted: relative paths mean nothing there, and MKL finds
    none of its libraries."""
    try:
        os.getcwd()
    except OSError as error:
        raise SettingsError(
            f"the current folder cannot be read ({error.strerror}): change to another one"
        ) from error
