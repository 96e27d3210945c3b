"""`streamserve bench`: benchmark servers over HTTP."""

import os
from typing import Annotated

import msgspec
import typer

from streamserve.cli.command import CheckedCommand
from streamserve.cli.flags import Flags, with_flags
from streamserve.extras.bench.errors import BenchError
from streamserve.extras.bench.options import BenchOptions
from streamserve.settings.options import SettingsError, convert, options

bench = typer.Typer(help="Benchmark servers over HTTP.", no_args_is_help=True, rich_markup_mode=None)
PARTS = {part.name: part.type for part in msgspec.structs.fields(BenchOptions)}


@bench.command(cls=CheckedCommand)
@with_flags({name.capitalize(): options(struct) for name, struct in PARTS.items()})
def serve(
    more_targets: Annotated[
        list[str] | None, typer.Argument(help="more targets for --goodput", metavar="TARGET")
    ] = None,
    *,
    flags: Flags,
) -> None:
    """Measure a server's latency and throughput.

    Sends requests to it, as `vllm bench serve` does.

    Ctrl-C stops sending and prints the results so far.
    """
    flags["goodput"] = [*flags.get("goodput", []), *(more_targets or [])]
    flags.setdefault("api_key", os.environ.get("OPENAI_API_KEY"))
    parts = {name: convert(flags, struct) for name, struct in PARTS.items()}
    try:
        from streamserve.extras.bench.command import run
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise SettingsError("the load client needs aiohttp: pip install 'streamserve[bench]'") from error
    try:
        run(BenchOptions(**parts))
    except BenchError as error:
        raise SettingsError(str(error)) from error
