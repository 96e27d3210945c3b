"""`streamserve serve`: serve one or several models over HTTP."""

from typing import Annotated

import typer

from streamserve.cli.flags import Config, Flags, PrintConfig, with_flags
from streamserve.cli.help import setting_groups

Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="checkpoint folders, .gguf files, Hugging Face hub names (owner/model), or `embedded`, "
        "the packaged model; NAME=MODEL or NAME,NAME=MODEL names it in the API. Requests that "
        "name no model use the first one. Several models are loaded on demand",
    ),
]


@with_flags(setting_groups())
def serve(
    models: Models = None, *, config: Config = None, print_config: PrintConfig = False, flags: Flags
) -> None:
    """Serve models over HTTP with OpenAI's API.

    Every setting except --kernel-path can also be an environment variable (STREAMSERVE_PORT=9000). Every
    setting can be a line of a TOML file (port = 9000), which --config or STREAMSERVE_CONFIG names. Flags
    override variables, and variables override the file.
    The table [models.NAME] of the file contains settings of one model, which override all other sources.
    """
    from streamserve.fleet.worker_process import may_use_gpu, prepared_fork_server
    from streamserve.settings.cluster import check_visible_keys
    from streamserve.settings.resolve import topology
    from streamserve.settings.several import resolve_served, served_to_toml
    from streamserve.system.available_memory import address_limit, available_bytes, check_processes

    served = resolve_served(models or (), flags, config)
    check_visible_keys(served.first.server, flags)
    if print_config:
        typer.echo(served_to_toml(served), nl=False)
        return
    server = served.first.server
    forked = server.fork_workers and not may_use_gpu(served.first.model.device)
    if server.launcher == "local":
        workers = len(topology(server).names)
        check_processes(workers, forked, available_bytes(), address_limit())
    # The workers' imports run while this process imports, too.
    with prepared_fork_server(forked and server.launcher == "local"):
        from streamserve.cli.run_server import run

        run(served)
