"""`streamserve models`: models of the hub, and writing of checkpoints, quantized or for benchmarks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from streamserve.cli.command import CheckedCommand
from streamserve.cli.flags import exit_on_error
from streamserve.extras.models.cached_models import list_models, pull, remove, show
from streamserve.protocol.errors import CheckpointError
from streamserve.settings.checkpoints import locate

models = typer.Typer(
    help="Download, list, show and write models.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for command, name in ((pull, "pull"), (list_models, "list"), (show, "show"), (remove, "rm")):
    models.command(name, cls=CheckedCommand)(command)


@models.command("inflate", cls=CheckedCommand)
@exit_on_error()
def inflate_model(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="a Llama checkpoint: folder, hub name, or `embedded`")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder to write; must be empty, or not exist")],
    *,
    hidden: Annotated[int, typer.Option(help="hidden size: the hidden size of SOURCE times a power of four")],
    layers: Annotated[int, typer.Option(help="number of layers, at least the number of layers of SOURCE")],
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
    """Write a larger checkpoint that generates the same text.

    For benchmarks: a step takes as long as with any other model of the larger shape, and the text is the
    text that SOURCE generates.
    """
    from streamserve.execution.formats.inflate import ModelShape, inflate

    shape = ModelShape(hidden, layers, heads, kv_heads, intermediate)
    with _progress(f"inflating {source}") as show:
        inflate(_folder(source), out, shape, show)
    _print_size(out)


@models.command("quantize", cls=CheckedCommand)
@exit_on_error()
def quantize_model(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="a 16-bit checkpoint: folder, hub name, or `embedded`")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder to write; must be empty, or not exist")],
    *,
    format: Annotated[
        str,
        typer.Option(
            help="int8 or int4 (one scale for each group of 128 or 64 inputs), int8:GROUP or "
            "int4:GROUP (one for each GROUP of 32, 64 or 128 inputs), or w8a8 (8 bits with one "
            "scale for each output)"
        ),
    ],
) -> None:
    """Write a checkpoint with quantized weights.

    The weights of the layers are quantized and written in the compressed-tensors format.

    The result generates the same text as SOURCE that is served with `--quantization FORMAT`. The guide to
    checkpoints lists other programs that can load it.
    """
    from streamserve.execution.formats.quantization import parse_format
    from streamserve.execution.formats.stored.export import export

    try:
        chosen = parse_format(format)
    except ValueError as error:
        raise CheckpointError(f"--format {error}") from None
    if chosen is None:
        raise CheckpointError("--format none: use int8, int4 or w8a8")
    folder = _folder(source)
    with _progress(f"quantizing {source}") as show:
        export(folder, out, chosen, show)
    _print_size(out)


@contextmanager
def _progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows the progress of the work on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task(text, total=None, visible=False)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total, visible=True)

        yield show


def _folder(source: str) -> Path:
    """Return the folder of a model. Raises CheckpointError for a GGUF file: these are not rewritten."""
    folder = locate(source)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a GGUF file, which can be served but not rewritten: give a folder"
        )
    return folder


def _print_size(folder: Path) -> None:
    typer.echo(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.0f} MB")
