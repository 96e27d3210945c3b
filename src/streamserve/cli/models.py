"""`streamserve models`: write checkpoints, quantized or for benchmarks."""

from pathlib import Path
from typing import Annotated

import typer

from streamserve.cli.flags import exit_on_error
from streamserve.protocol.errors import CheckpointError
from streamserve.settings.checkpoints import locate

models = typer.Typer(help="Write checkpoints: quantized, or inflated for benchmarks.", no_args_is_help=True)


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
    _print_size(out)


@models.command("quantize")
@exit_on_error()
def quantize_model(
    source: Annotated[str, typer.Argument(help="a 16-bit checkpoint: folder, hub name, or `embedded`")],
    out: Annotated[Path, typer.Argument(help="folder to write; must not exist or be empty")],
    *,
    format: Annotated[
        str,
        typer.Option(
            help="int8 or int4, or int8:GROUP, int4:GROUP with a scale for each GROUP (32, 64, 128) of inputs"
        ),
    ],
) -> None:
    """Write a checkpoint whose layers' weights are quantized, in the compressed-tensors format.

    It gives the same text as SOURCE with `--quantization` and this format. The guide to checkpoints says
    which other readers of the format can load it.
    """
    from rich.console import Console
    from rich.progress import Progress

    from streamserve.execution.quantization import parse_format
    from streamserve.execution.stored.export import export

    try:
        chosen = parse_format(format)
    except ValueError as error:
        raise CheckpointError(f"--format {error}") from None
    if chosen is None:
        raise CheckpointError("--format none: use int8 or int4")
    folder = locate(source)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"quantizing {source}", total=None, visible=False)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total, visible=True)

        export(folder, out, chosen, show)
    _print_size(out)


def _print_size(folder: Path) -> None:
    typer.echo(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.0f} MB")
