"""`streamserve keys`: keys of draft services and their targets, and of machines that join a server."""

from pathlib import Path
from typing import Annotated

import typer

from streamserve.cli.command import CheckedCommand
from streamserve.cli.flags import exit_on_error
from streamserve.protocol.curve import KeyPair, read_key_pair, write_key_pair
from streamserve.settings.options import SettingsError

keys = typer.Typer(
    help="Create and show keys of draft services and machines.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@keys.command("new", cls=CheckedCommand)
@exit_on_error()
def new_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="file to write; must not exist")],
) -> None:
    """Create a key, and print its public key.

    The key is for a draft service or a target server, or for a server and the machines that join it.

    Start a draft service with --key FILE and --clients LIST. LIST contains the public keys of the target
    servers, one per line, each followed by a name. Start a target server with --draft-key FILE and --draft
    tcp://SERVICEKEY@HOST:PORT.

    Start a server that machines join with --launcher join --join-key FILE. Start `streamserve worker` on each
    machine with --key and either a copy of that file or another key, whose public key the server lists in
    --join-clients.
    """
    import zmq
    from zmq.utils import z85

    public, secret = (z85.decode(half) for half in zmq.curve_keypair())
    write_key_pair(file, KeyPair(public, secret))
    typer.echo(public.hex())


@keys.command("show", cls=CheckedCommand)
@exit_on_error()
def show_key(file: Annotated[Path, typer.Argument(metavar="FILE", help="the key file to read")]) -> None:
    """Print the public key of a key file."""
    try:
        typer.echo(read_key_pair(file).public.hex())
    except ValueError as error:
        raise SettingsError(str(error)) from None
