"""`streamserve serve`: serve a model over HTTP."""

from streamserve.cli.flags import Config, Flags, Model, PrintConfig, server_settings, with_flags
from streamserve.cli.help import setting_groups


@with_flags(setting_groups())
def serve(
    model: Model = None, *, config: Config = None, print_config: PrintConfig = False, flags: Flags
) -> None:
    """Serve a model over HTTP with OpenAI's API.

    Every setting is also an environment variable (STREAMSERVE_PORT=9000) and a line of a TOML file (port =
    9000, given by --config or STREAMSERVE_CONFIG). Flags override variables, and variables override the file.
    """
    settings = server_settings(model, flags, config, print_config)
    from streamserve.cli.run_server import run

    run(settings)
