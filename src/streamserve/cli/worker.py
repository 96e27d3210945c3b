"""`streamserve worker`: offer this machine to a server that runs on another one."""

from typing import Annotated

import typer

from streamserve.cli.flags import exit_on_error
from streamserve.protocol.config import LogLevel


@exit_on_error()
def worker(
    join: Annotated[
        str,
        typer.Option(
            help="address of a server that was started with --launcher join; SERVERKEY is its public key, "
            "without which --key must be a copy of its key file",
            metavar="tcp://[SERVERKEY@]HOST:PORT",
        ),
    ],
    *,
    key: Annotated[
        str | None,
        typer.Option(
            help="file with this machine's key: a copy of the server's --join-key, or one whose public key "
            "is in its --join-clients",
            metavar="FILE",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="name of this machine in logs and views; by default its host name")
    ] = None,
    workers: Annotated[
        int, typer.Option(help="maximum number of workers on this machine", min=1, max=64)
    ] = 1,
    model: Annotated[
        str | None,
        typer.Option(
            help="where the server's model is on this machine, as for `streamserve serve`; by default at the "
            "same path as there"
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="address at which other machines reach this one, for KV of pairs; by default the one from "
            "which it reaches the server"
        ),
    ] = None,
    keep_workers: Annotated[
        float,
        typer.Option(
            help="seconds for which workers keep weights, prefix cache and outputs for the next server after "
            "the connection to theirs was lost, or it has died; 0: they end with it",
            metavar="SECONDS",
            min=0.0,
            max=86400.0,
        ),
    ] = 300.0,
    log_level: Annotated[LogLevel, typer.Option(help="minimum level of log messages")] = "info",
) -> None:
    """Run workers on this machine for a server on another one.

    The server is started with `streamserve serve MODEL --launcher join --listen tcp://0.0.0.0:7800
    --join-key FILE`. This command starts and ends workers as it asks, and joins it again after either was
    restarted or the connection was lost. Stop it with Ctrl-C or SIGTERM.
    """
    from streamserve.settings.cluster import resolve_join

    settings = resolve_join(join, key, name, address, workers, model, keep_workers)
    from streamserve.cli.run_worker import run

    run(settings, log_level)
