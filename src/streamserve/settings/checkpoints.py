"""Locate a model: a packaged one by name, a folder, a GGUF file, or a repository of the Hugging Face hub."""

from pathlib import Path

from streamserve import embedded
from streamserve.gguf.paths import SUFFIX, gguf_file
from streamserve.protocol.errors import CheckpointError

TOKENIZER = "tokenizer.json"
EMBEDDED = ("embedded", "embedded-draft")
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def locate(model: str) -> Path:
    """Return the folder of `model`, or its GGUF file.

    A hub name (`owner/name`, optionally `@revision`) is downloaded unless it is in the hub's cache. Raises
    CheckpointError if there is no such model.
    """
    if model in EMBEDDED:
        return embedded.path(model)
    if not model:
        raise CheckpointError("the name is empty: give a checkpoint folder, a .gguf file or a hub name")
    path = Path(model).expanduser()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # it may be a name on the hub
    except OSError as error:
        raise CheckpointError(f"{model:.200} cannot be read: {error.strerror}") from error
    file = gguf_file(path)
    if file or path.is_dir():
        return file or path
    if path.exists():
        raise CheckpointError(
            f"{model} is a file: give the folder that contains its config.json, or a .gguf file"
        )
    if model.startswith(("/", ".", "~")) or model.count("/") != 1 or path.suffix == SUFFIX:
        kind = "file" if path.suffix == SUFFIX else "folder"
        raise CheckpointError(
            f"there is no {kind} {model}: give a checkpoint folder, a .gguf file, a hub name such as "
            f"owner/model, or one of: {', '.join(EMBEDDED)}"
        )
    return _download(model)


def root_name(model: str, path: str) -> str:
    """Return where to load the tokenizer of `model` from: its hub name, else the folder or file at `path`."""
    name = model.partition("@")[0]
    local = model in EMBEDDED or Path(model).expanduser().exists()
    return path if local else name


def packaged_draft(target: Path) -> Path | None:
    """Return the packaged draft model, if it fits the checkpoint `target`.

    The packaged target, and every model inflated from it, has a byte-identical tokenizer. None for the draft
    itself and for every other model.
    """
    try:
        folder = embedded.path("embedded-draft")
        same = (target / TOKENIZER).read_bytes() == (folder / TOKENIZER).read_bytes()
    except OSError:
        return None
    return folder if same and target.resolve() != folder.resolve() else None


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import

    name, _, revision = model.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=HUB_FILES))
    except Exception as error:  # many kinds: no such repository, no network, no permission, bad name
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{model} is not a local folder, and cannot be downloaded from the hub: {reason}"
        ) from error
