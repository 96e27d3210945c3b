"""`streamserve doctor`: check whether this machine can serve, and what would be slow."""

from typing import Annotated

import typer

from streamserve.cli.flags import exit_on_error


@exit_on_error()
def doctor(
    *,
    host: Annotated[str, typer.Option(help="address that a server would listen on")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port that a server would listen on; 0: any free port")
    ] = 8000,
) -> None:
    """Check whether this machine can serve.

    Checks processor, kernels, memory, folders and port, and says how to solve problems. Nothing is changed,
    compiled or measured. Exit status 1 means that a server could not start.
    """
    from streamserve.cli.run_doctor import run

    run(host, port)
