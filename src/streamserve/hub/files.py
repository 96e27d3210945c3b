"""Choose the files of a repository to load: safetensors with config, tokenizer and templates, or all parts of
one GGUF model."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePosixPath

from streamserve.gguf.paths import PART, SUFFIX
from streamserve.hub.names import HubName
from streamserve.protocol.errors import CheckpointError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEXTS = (".json", ".jinja", ".model", ".txt")
"""File name suffixes of configs, tokenizers and templates."""
TEMPLATES = "additional_chat_templates"

_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d[A-Z0-9_]*|TQ\d_\d|MXFP4(?:_[A-Z0-9_]+)?|NVFP4|BF16|FP?16|FP?32))$"
)
_SHOWN = 24
"""Maximum number of quantizations that an error message names."""
_NOT_MODELS = ("mmproj", "imatrix")
"""File name prefixes of GGUF files that are no language models: vision projectors, importance matrices."""


def folder_files(name: HubName, files: Iterable[str]) -> list[str]:
    """Return the files of a model in Hugging Face layout, without shards: the index names these. Raises
    CheckpointError if the repository `name` has no model that can be loaded."""
    files = set(files)
    if CONFIG not in files:
        raise CheckpointError(f"{name}: the repository has neither a {CONFIG} nor GGUF files")
    if not files & {SINGLE, INDEX}:
        raise CheckpointError(
            f"{name}: the repository has no weights in safetensors ({SINGLE}, or shards with {INDEX}), the "
            "only format that is read"
        )
    weights = {INDEX} if INDEX in files else {SINGLE}
    other_indexes = {file for file in files if file.endswith(".index.json")}
    return sorted(weights | {file for file in files - other_indexes if _is_text(file)})


def _is_text(file: str) -> bool:
    """Return whether a file may contain a config, tokenizer or template. In subfolders, these are only the
    config of an embedding model's pooling and named templates."""
    path = PurePosixPath(file)
    if path.suffix not in TEXTS or path.name.lower().startswith(("readme", "license")):
        return False
    folders = path.parts[:-1]
    return not folders or (len(folders) == 1 and folders[0].endswith(("_Pooling", TEMPLATES)))


def gguf_models(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the GGUF models among `files`: the first file of each, mapped to all its files in order."""
    models: dict[str, list[str]] = defaultdict(list)
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix.lower() == SUFFIX and not path.name.lower().startswith(_NOT_MODELS):
            part = PART.fullmatch(path.name)
            models[str(path.with_name(part[1] + "-of-" + part[3])) if part else file].append(file)
    return {parts[0]: parts for parts in models.values()}


def quantization_of(file: str) -> str:
    """Return the quantization at the end of a GGUF file's name, in capitals; the file's name if it has
    none."""
    path = PurePosixPath(file)
    part = PART.fullmatch(path.name)
    match = _QUANTIZATION.search((part[1] if part else path.stem).upper())
    return match[1] if match else path.name


def gguf_files(name: HubName, files: Iterable[str]) -> list[str]:
    """Return the files of the GGUF model that `name` asks for, in order. Raises CheckpointError, which lists
    the repository's models, unless exactly one model matches and all its parts are there."""
    models = gguf_models(files)
    wanted = name.quantization
    if wanted is None:
        chosen = list(models)
    elif wanted.lower().endswith(SUFFIX):
        chosen = [first for first in models if wanted in (first, PurePosixPath(first).name)]
    else:
        chosen = [first for first in models if quantization_of(first) == wanted.upper()]
    if len(chosen) != 1:
        raise CheckpointError(_ambiguous(name, list(models), chosen))
    parts = models[chosen[0]]
    part = PART.fullmatch(PurePosixPath(chosen[0]).name)
    if part and (int(part[2]) != 1 or len(parts) != int(part[3])):
        raise CheckpointError(
            f"{name}: the repository has {len(parts)} of the {int(part[3])} parts of {part[1]}"
        )
    return parts


def _ambiguous(name: HubName, models: list[str], chosen: list[str]) -> str:
    if not models:
        return f"{name}: the repository has no GGUF files"
    if len(chosen) > 1 and name.quantization:
        several = ", ".join(PurePosixPath(first).name for first in chosen[:_SHOWN])
        return f"{name}: several files are in {name.quantization}, give one as {name.repo}:FILE: {several}"
    there = sorted({quantization_of(first) for first in models})
    listed = ", ".join(there[:_SHOWN]) + (f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else "")
    if name.quantization is None:
        return f"{name}: the repository holds several models, give one as {name.repo}:{there[0]}: {listed}"
    return f"{name}: the repository has no {name.quantization}; it has: {listed}"


def wants_gguf(name: HubName, files: Iterable[str]) -> bool:
    """Return whether `name` is a GGUF model: it has a quantization, or the repository only has GGUF files."""
    files = set(files)
    return bool(name.quantization) or (not files & {SINGLE, INDEX} and bool(gguf_models(files)))
