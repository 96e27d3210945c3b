"""`streamserve batch`: answer a file of requests, without a server."""

from pathlib import Path
from typing import Annotated

import typer

from streamserve.cli.flags import Config, Flags, PrintConfig, settings_for, with_flags
from streamserve.cli.help import setting_groups
from streamserve.settings.commands import other_options
from streamserve.settings.options import SettingsError

Model = Annotated[
    str | None, typer.Option(help="the model, as for `streamserve serve`; by default `embedded`")
]


@with_flags(setting_groups("batch"), other_options("batch"))
def batch(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="requests in OpenAI's batch format, one JSON object per line"),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="file for the results, in the order of FILE; by default FILE.results.jsonl"
        ),
    ] = None,
    model: Model = None,
    config: Config = None,
    print_config: PrintConfig = False,
    flags: Flags,
) -> None:
    """Answer a file of requests, without a server.

    Results are written in the order of FILE, each as soon as it and all results before it are complete. If
    the output exists, requests that have a result in it are skipped, so the same command continues after an
    interrupt. The exit status is 1 if any request failed.
    """
    settings = settings_for("batch", model, flags, config, print_config)
    target = output or file.with_name(f"{file.name}.results.jsonl")
    if target.resolve() == file.resolve():
        raise SettingsError("--output must not be the input file")
    from streamserve.extras.batches.run_batch import run

    outcome = run(settings, file, target)
    answered = outcome.requests - outcome.earlier
    done = f"{answered} requests were answered" if answered else f"all {outcome.requests} had results"
    typer.echo(f"streamserve: {done}: see {target}", err=True)
    if outcome.failed:
        typer.secho(f"streamserve: {outcome.failed} requests failed: see {target}", fg="red", err=True)
        raise typer.Exit(1)
