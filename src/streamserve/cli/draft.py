"""`streamserve draft`: one draft model for many servers."""

from typing import Annotated

import typer

from streamserve.cli.flags import Flags, with_flags
from streamserve.protocol.config import LogLevel
from streamserve.settings.draft import draft_options, resolve_draft


@with_flags({"Settings": draft_options()})
def draft(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="the draft model, as for `streamserve serve`; by default `embedded-draft`"
        ),
    ] = None,
    *,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="print measured values next to the predictions of the performance model, every 2 seconds",
        ),
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="minimum level of log messages")] = "info",
    flags: Flags,
) -> None:
    """Draft tokens for many target servers with one draft model.

    Target servers use it with --draft tcp://HOST:PORT.
    """
    settings = resolve_draft(model, flags)
    from streamserve.cli.run_draft_service import run

    run(settings, explain, log_level)
