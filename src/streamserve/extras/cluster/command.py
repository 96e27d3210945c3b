"""`streamserve worker`: offers this machine to a server that runs on another machine."""

from typing import Annotated

import typer

from streamserve.cli.flags import exit_on_error
from streamserve.protocol.config import LogLevel


@exit_on_error()
def worker(
    join: Annotated[
        str,
        typer.Option(
            help="address of a server that was started with --launcher join; SERVERKEY is its public "
            "key; without SERVERKEY, --key must be a copy of the server's key file",
            metavar="tcp://[SERVERKEY@]HOST:PORT",
        ),
    ],
    *,
    key: Annotated[
        str | None,
        typer.Option(
            help="file with this machine's key: a copy of the server's --join-key, or a key whose "
            "public key is listed in the server's --join-clients",
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
            help="path or name of the server's model on this machine, as for `streamserve serve`; by "
            "default the path on the server"
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="address at which other machines reach this machine, for KV of pairs; by default the "
            "address from which it reaches the server"
        ),
    ] = None,
    keep_workers: Annotated[
        float,
        typer.Option(
            help="seconds that workers keep weights, prefix cache and outputs for the next server "
            "after their server died or the connection to it was lost; 0: they end with their "
            "server",
            metavar="SECONDS",
            min=0.0,
            max=86400.0,
        ),
    ] = 300.0,
    log_level: Annotated[LogLevel, typer.Option(help="minimum level of log messages")] = "info",
) -> None:
    """Run workers on this machine for a server on another machine.

    Start the server with `streamserve serve MODEL --launcher join --listen tcp://0.0.0.0:7800
    --join-key FILE`. This command starts and ends workers when the server asks for it. It joins the server
    again after the connection was lost, or either of them was restarted. Stop it with Ctrl-C or SIGTERM.
    """
    from streamserve.settings.cluster import resolve_join

    settings = resolve_join(join, key, name, address, workers, model, keep_workers)
    from streamserve.extras.cluster.run_worker import run

    run(settings, log_level)
