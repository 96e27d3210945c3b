"""Download the files that a model is loaded from, into huggingface_hub's own cache."""

import glob
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from streamserve.hub.errors import hub_errors
from streamserve.hub.files import INDEX, folder_files, gguf_files, wants_gguf
from streamserve.hub.names import HubName
from streamserve.protocol.errors import CheckpointError

MAX_INDEX_BYTES = 64 << 20
"""Maximum size of an index of shards, in bytes."""

_TOKEN = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class Download:
    """A planned download: the model has `files` files of `size` bytes together, and `missing` bytes are not
    in the cache yet. The disk of the folder `cache` has `free` bytes left."""

    name: HubName
    files: int
    size: int
    missing: int
    cache: Path
    free: int


def ignore(download: Download) -> None:
    """Show nothing before a download: the default `begin`."""


def download(name: HubName, token: str | None = None, begin: Callable[[Download], None] = ignore) -> Path:
    """Download a model's missing files; return its folder in the cache, or its first GGUF file. `begin` is
    called before the download. Without a `token`, the environment's token is used.

    Raises CheckpointError if the hub refuses or the disk is too full, Unreachable if the hub cannot be
    reached.
    """
    if token is not None and not _TOKEN.fullmatch(token):
        raise CheckpointError("the token contains characters that are not valid in a token of the hub")
    with hub_errors(name):
        files = _choose(name, _listed(name, token), token)
        planned = _plan(name, files, token)
        begin(planned)
        if planned.missing > planned.free:
            raise CheckpointError(
                f"{name}: the download needs {_gb(planned.missing)}, but {_gb(planned.free)} are free at "
                f"{planned.cache}: free disk space, or set HF_HOME to another disk"
            )
        folder = _fetch(name, files, token)
    gone = [file for file in files if not (folder / file).exists()]
    if gone:
        raise CheckpointError(f"{name} changed on the hub while it was downloaded ({gone[0]}): try again")
    return model_path(name, folder, files)


def model_path(name: HubName, folder: Path, files: list[str]) -> Path:
    """Return the path that a model is loaded from: its `folder`, or its first GGUF file."""
    return folder / files[0] if wants_gguf(name, files) else folder


def _listed(name: HubName, token: str | None) -> list[str]:
    from huggingface_hub import HfApi

    listing = HfApi().model_info(name.repo, revision=name.revision, token=token).siblings or []
    return [entry.rfilename for entry in listing]


def _choose(name: HubName, listed: list[str], token: str | None) -> list[str]:
    """Return the files to load, out of all files `listed` in the repository. For a sharded model this
    downloads the index, which names the shards."""
    if wants_gguf(name, listed):
        return gguf_files(name, listed)
    files = folder_files(name, listed)
    if INDEX not in files:
        return files
    from huggingface_hub import hf_hub_download

    with_index = hf_hub_download(name.repo, INDEX, revision=name.revision, token=token)
    shards = shards_of(Path(with_index))
    missing = sorted(set(shards) - set(listed))
    if missing:
        raise CheckpointError(f"{name}: the repository lacks {missing[0]}, which its {INDEX} names")
    return files + shards


def shards_of(index: Path) -> list[str]:
    """Return the shards that the file `index` names. Raises CheckpointError if the index is damaged."""
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{index} has more than {MAX_INDEX_BYTES >> 20} MiB")
        shards = {str(shard) for shard in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read as an index of shards: {error}") from error
    if any(PurePosixPath(shard).name != shard or not shard.endswith(".safetensors") for shard in shards):
        raise CheckpointError(f"{index}: weight_map must name safetensors files of its folder")
    return sorted(shards)


def _plan(name: HubName, files: list[str], token: str | None) -> Download:
    from huggingface_hub import constants, hf_hub_download

    planned = [
        hf_hub_download(name.repo, file, revision=name.revision, token=token, dry_run=True) for file in files
    ]
    cache = existing_parent(Path(constants.HF_HUB_CACHE))
    size = sum(file.file_size or 0 for file in planned)
    missing = sum(file.file_size or 0 for file in planned if file.will_download)
    return Download(name, len(files), size, missing, cache, shutil.disk_usage(cache).free)


def _fetch(name: HubName, files: list[str], token: str | None) -> Path:
    """Download the `files`, with progress on standard error; return their folder."""
    from huggingface_hub import snapshot_download

    patterns = [glob.escape(file) for file in files]
    return Path(snapshot_download(name.repo, revision=name.revision, token=token, allow_patterns=patterns))


def existing_parent(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
