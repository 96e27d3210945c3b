"""`streamserve models pull | list | show | rm`: models of the hub, in huggingface_hub's cache."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from streamserve.cli.flags import exit_on_error
from streamserve.hub.names import HubName, parse_hub_name
from streamserve.protocol.errors import CheckpointError

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="owner/model, or owner/model:Q4_K_M for one model of a GGUF repository; @revision may follow",
    ),
]

Local = Annotated[
    str, typer.Argument(metavar="NAME", help="a cached model, a folder, a .gguf file or `embedded`")
]


@exit_on_error()
def pull(
    name: Name,
    *,
    revision: Annotated[str | None, typer.Option(help="a branch, tag or commit")] = None,
    token: Annotated[
        str | None,
        typer.Option(help="access token of the hub; by default HF_TOKEN, or the token of `hf auth login`"),
    ] = None,
) -> None:
    """Download a model from the hub.

    Only files that are needed to load the model are downloaded, and only if they are not in the cache.
    """
    from streamserve.hub.download import Download, download

    hub_name = _hub_name(name)
    if revision is not None:
        if hub_name.revision:
            raise CheckpointError(
                f"{name} contains a revision, and --revision is given too: leave one of them out"
            )
        hub_name = replace(hub_name, revision=revision)

    def begin(planned: Download) -> None:
        what = f"{_size(planned.missing)} to download" if planned.missing else "all in the cache"
        sizes = f"{planned.files} files, {_size(planned.size)}: {what}"
        typer.echo(f"{hub_name}: {sizes}; {_size(planned.free)} free at {planned.cache}", err=True)

    typer.echo(str(download(hub_name, token, begin)))


@exit_on_error()
def list_models() -> None:
    """List the models in the hub's cache.

    The last column says whether a model can be served, and if not, why.
    """
    from streamserve.hub.cache import cached_models
    from streamserve.hub.files import quantization_of

    rows = [("NAME", "SIZE", "FORMAT", "ARCHITECTURE", "SERVED")]
    for model in cached_models():
        kind = f"GGUF {quantization_of(model.file)}" if model.file else "safetensors"
        architecture, served = _served(model.path)
        rows.append((str(model.name), _size(model.size), kind, architecture, served))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    if len(rows) == 1:
        typer.echo("no model is in the cache: `streamserve models pull owner/model` downloads one", err=True)
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        typer.echo("  ".join([*cells, row[4]]))


@exit_on_error()
def show(
    name: Local,
) -> None:
    """Show what a model is and the memory it needs. Nothing is downloaded."""
    from streamserve.execution.loading.describe import describe
    from streamserve.settings.embedding import detect_task
    from streamserve.text.tokenizer import Tokenizer
    from streamserve.text.tools.formats import FORMATS, find_format

    path = _local_path(name)
    task = detect_task(path)
    model, template = describe(path, task == "embed"), Tokenizer.from_folder(path).chat_template
    format = find_format("auto", template)
    tools = next((known for known, each in FORMATS.items() if each is format), "none")
    lines = {
        "path": str(path),
        "architecture": model.architecture,
        "task": task,
        "parameters": f"{model.parameters / 1e6:.1f} M in {model.layers} layers",
        "weights": model.weights,
        "context": f"{model.context} tokens",
        "vocabulary": f"{model.vocabulary} tokens",
        "chat template": "yes" if template else "no",
        "tool format": tools,
        "memory": (
            f"{_size(model.weight_bytes)} weights, {_size(model.kv_token_bytes * model.context)} KV "
            f"cache for a full context ({model.kv_token_bytes / 1e3:.1f} kB per token)"
        ),
    }
    for label, text in lines.items():
        typer.echo(f"{label:14} {text}")


@exit_on_error()
def remove(
    name: Name, *, yes: Annotated[bool, typer.Option("--yes", help="remove without asking")] = False
) -> None:
    """Remove a model from the hub's cache.

    NAME selects one GGUF model, one revision, or a whole repository.
    """
    from streamserve.hub.cache import removal

    strategy = removal(_hub_name(name))
    freed = _size(strategy.expected_freed_size)
    if not (yes or typer.confirm(f"remove {name}, which frees {freed}?", err=True)):
        raise SystemExit(1)
    strategy.execute()
    typer.echo(f"{name}: removed, {freed} freed")


def _hub_name(name: str) -> HubName:
    """Return the parsed name. Raises CheckpointError if it is not a name on the hub."""
    hub_name = parse_hub_name(name)
    if hub_name is None:
        raise CheckpointError(f"{name} is not a name on the hub: give owner/model or owner/model:Q4_K_M")
    return hub_name


def _local_path(name: str) -> Path:
    """Return the path of a model on this machine. Raises CheckpointError if the model is not there."""
    from streamserve.hub.cache import cached_path
    from streamserve.settings.checkpoints import expanded, locate

    hub_name = parse_hub_name(name)
    if hub_name is None or expanded(name).exists():
        return locate(name)
    cached = cached_path(hub_name)
    if cached is None:
        raise CheckpointError(f"{name} is not in the cache: streamserve models pull {name} downloads it")
    return cached


def _served(path: Path) -> tuple[str, str]:
    """Return a cached model's architecture, and whether it can be served: "yes", or "no" with the reason."""
    from streamserve.execution.loading.describe import architecture, describe
    from streamserve.settings.embedding import detect_task, read_embedding
    from streamserve.text.tokenizer import Tokenizer

    try:
        embeds = detect_task(path) == "embed"
        describe(path, embeds)
        Tokenizer.from_folder(path)
        if embeds:
            read_embedding(path)
    except CheckpointError as error:
        return architecture(path), f"no: {_without(path, error)}"
    return architecture(path), "yes"


def _without(path: Path, error: CheckpointError) -> str:
    """Return an error's text without the path of the model's folder in the cache."""
    folder = path if path.is_dir() else path.parent
    return str(error).replace(f"{folder}/", "").replace(f"{folder}: ", "")


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
