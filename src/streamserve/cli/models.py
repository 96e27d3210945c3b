"""`streamserve models`: checkpoints for benchmarks."""

from pathlib import Path
from typing import Annotated

import typer

from streamserve.cli.flags import exit_on_error
from streamserve.settings.checkpoints import locate

models = typer.Typer(help="Create checkpoints for benchmarks.", no_args_is_help=True)


@models.command("inflate")
@exit_on_error()
def inflate_model(
    source: Annotated[str, typer.Argument(help="a Llama checkpoint: folder, hub name, or `embedded`")],
    out: Annotated[Path, typer.Argument(help="folder to write; must not exist or be empty")],
    *,
    hidden: Annotated[int, typer.Option(help="hidden size: that of SOURCE, times a power of four")],
    layers: Annotated[int, typer.Option(help="number of layers, at least that of SOURCE")],
    heads: Annotated[
        int | None, typer.Option(help="number of attention heads; by default scaled like the hidden size")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="number of key-value heads; by default scaled like the hidden size")
    ] = None,
    intermediate: Annotated[
        int | None, typer.Option(help="intermediate size of the MLP; by default scaled like the hidden size")
    ] = None,
) -> None:
    """Write a larger checkpoint that computes exactly the same function at the larger model's cost.

    For benchmarks: it generates the same text as SOURCE, and a step takes as long as with any model of its
    shape.
    """
    from streamserve.execution.inflate import Shape, inflate

    inflate(locate(source), out, Shape(hidden, layers, heads, kv_heads, intermediate))
    typer.echo(f"{out}: {sum(file.stat().st_size for file in out.iterdir()) / 1e6:.0f} MB")
