"""List, find and remove models in huggingface_hub's cache."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from streamserve.hub.download import model_path, shards_of
from streamserve.hub.files import (
    INDEX,
    SINGLE,
    folder_files,
    gguf_files,
    gguf_models,
    quantization_of,
    wants_gguf,
)
from streamserve.hub.names import HubName
from streamserve.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo, DeleteCacheStrategy

DEFAULT_BRANCH = "main"

Files = Mapping[str, "CachedFileInfo"]
"""The files of a revision by their paths in the repository."""


@dataclass(frozen=True)
class CachedModel:
    """A cached model of `size` bytes. `path` is its folder, or the first file of a GGUF model; `file` is that
    file's path in the repository (None for a folder)."""

    name: HubName
    path: Path
    size: int
    file: str | None = None


def cached_models() -> list[CachedModel]:
    """Return the models in the cache, sorted by name. Each revision of a repository, and each GGUF model in
    it, is one model."""
    models = [
        model for repo in _repositories() for revision in repo.revisions for model in _models(repo, revision)
    ]
    return sorted(models, key=lambda model: str(model.name))


def cached_path(name: HubName) -> Path | None:
    """Return the folder of a cached model, or its first GGUF file; None if its repository or revision is not
    in the cache. Raises CheckpointError if the cache lacks some of the model's files."""
    revision = next((each for repo in _named(name) for each in _revisions(repo, name)), None)
    if revision is None:
        return None
    files = _files(revision)
    if wants_gguf(name, files):
        return model_path(name, revision.snapshot_path, gguf_files(name, files))
    needed = folder_files(name, files)
    shards = shards_of(revision.snapshot_path / INDEX) if INDEX in files else []
    missing = sorted(set(shards) - files.keys())
    if missing:
        raise CheckpointError(f"{name}: {missing[0]} is not in the cache, run streamserve models pull {name}")
    return model_path(name, revision.snapshot_path, needed)


def removal(name: HubName) -> "DeleteCacheStrategy":
    """Return the plan that removes a model from the cache; it knows the bytes that this frees. A name with a
    quantization removes that GGUF model, a name with a revision that revision, and a name with neither the
    whole repository. Raises CheckpointError if the model is not in the cache."""
    from huggingface_hub import scan_cache_dir

    info = scan_cache_dir() if _named(name) else None
    repo = next((each for each in info.repos if _is(each, name)), None) if info else None
    found = _revisions(repo, name) if repo else []
    if not (info and repo and found):
        raise CheckpointError(f"{name} is not in the cache: streamserve models list shows the cached models")
    # Revisions are deleted by commit hash. Copies of a repository share commits: keep only this repository.
    info = replace(info, repos=frozenset([repo]))
    if name.quantization is None:
        revisions = found if name.revision else repo.revisions
        return info.delete_revisions(*(revision.commit_hash for revision in revisions))
    files = _files(found[0])
    parts = gguf_files(name, files)
    if len(gguf_models(files)) == 1:
        return info.delete_revisions(found[0].commit_hash)
    return info.delete_files(*(files[part] for part in parts))


def _repositories() -> list["CachedRepoInfo"]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def _named(name: HubName) -> list["CachedRepoInfo"]:
    return [repo for repo in _repositories() if _is(repo, name)]


def _is(repo: "CachedRepoInfo", name: HubName) -> bool:
    return repo.repo_type == "model" and repo.repo_id == name.repo


def _revisions(repo: "CachedRepoInfo", name: HubName) -> list["CachedRevisionInfo"]:
    """Return the cached revision that `name` refers to; an empty list if the cache does not have it."""
    wanted = name.revision or DEFAULT_BRANCH
    return [each for each in repo.revisions if wanted in each.refs or each.commit_hash == wanted]


def _files(revision: "CachedRevisionInfo") -> Files:
    return {file.file_path.relative_to(revision.snapshot_path).as_posix(): file for file in revision.files}


def _models(repo: "CachedRepoInfo", revision: "CachedRevisionInfo") -> list[CachedModel]:
    files = _files(revision)
    at = None if DEFAULT_BRANCH in revision.refs else min(revision.refs, default=revision.commit_hash)
    models = [
        CachedModel(
            HubName(repo.repo_id, quantization, at),
            revision.snapshot_path / parts[0],
            sum(files[part].size_on_disk for part in parts),
            parts[0],
        )
        for quantization, parts in _named_quantizations(files).items()
    ]
    if files.keys() & {SINGLE, INDEX} or not models:
        others = [file for path, file in files.items() if not path.endswith(".gguf")]
        size = sum(file.size_on_disk for file in others)
        models.append(CachedModel(HubName(repo.repo_id, None, at), revision.snapshot_path, size))
    return models


def _named_quantizations(files: Files) -> dict[str, list[str]]:
    """Return the files of each GGUF model, by the quantization that identifies the model in a `HubName`.
    Where several models have the same quantization, their first file identifies them."""
    models = gguf_models(files)
    kinds = [quantization_of(first) for first in models]
    return {
        kind if kinds.count(kind) == 1 else first: parts
        for kind, (first, parts) in zip(kinds, models.items(), strict=True)
    }
