"""Read whether a checkpoint is an embedding model, and how it pools: from the files of sentence-transformers,
or from the entry `pooling_type` of a GGUF file.

modules.json                 the steps: Transformer, Pooling, and optionally Normalize
1_Pooling/config.json        which hidden states become the embedding
sentence_bert_config.json    the maximum number of tokens of a text
config.json                  matryoshka_dimensions; an architecture without an output head (Qwen3Model)
"""

import json
from pathlib import Path
from typing import Any, Literal, NoReturn

from streamserve.contracts.embedding import EmbeddingConfig
from streamserve.gguf.files import open_gguf
from streamserve.gguf.paths import gguf_file
from streamserve.protocol.config import Task
from streamserve.protocol.errors import CheckpointError

MAX_BYTES = 64 << 20
MODULES = "modules.json"
POOLINGS: dict[str, Literal["last", "mean"]] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
GGUF_POOLINGS: dict[int, Literal["last", "mean"]] = {1: "mean", 3: "last"}
"""Pooling by the entry `pooling_type`. 0 (none) counts as a missing entry. Not supported: 2 (the first
token), 4 (a reranker's head)."""


def detect_task(path: Path) -> Task:
    """Return the task of the checkpoint at `path`: "embed" or "generate". Raises CheckpointError if its files
    cannot be read."""
    file = gguf_file(path)
    if file is not None:
        return "embed" if _gguf_pooling(file) else "generate"
    names = _read(path / "config.json").get("architectures")
    headless = isinstance(names, list) and any(str(name).endswith("Model") for name in names)
    return "embed" if headless or (path / MODULES).exists() else "generate"


def read_embedding(path: Path) -> EmbeddingConfig:
    """Return the embedding settings of the checkpoint at `path`. Defaults are last-token pooling and
    normalization. Raises CheckpointError naming a kind of pooling that is not supported."""
    file = gguf_file(path)
    if file is not None:
        return EmbeddingConfig(pooling=_gguf_kind(file))
    dimensions = _dimensions(path / "config.json")
    if not (path / MODULES).exists():
        return EmbeddingConfig(dimensions=dimensions)
    modules = _modules(path)
    pooling = next((folder for kind, folder in modules if kind == "Pooling"), None)
    if pooling is None:
        _refuse(path / MODULES, "has no Pooling module")
    return EmbeddingConfig(
        pooling=_pooling(path / pooling / "config.json"),
        normalize=any(kind == "Normalize" for kind, _ in modules),
        max_tokens=_max_tokens(path / "sentence_bert_config.json"),
        dimensions=dimensions,
    )


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the kind and the folder of each module."""
    file = path / MODULES
    entries = _load(file)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        _refuse(file, "must be a list of modules")
    modules = [(str(entry.get("type")).rpartition(".")[2], str(entry.get("path", ""))) for entry in entries]
    for kind, folder in modules:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            _refuse(file, f"module {kind} is not supported (supported: Transformer, Pooling, Normalize)")
        if folder != Path(folder).name or folder == "..":
            _refuse(file, f"path {folder!r:.80} must name a folder next to it")
        if kind == "Transformer" and folder:
            _refuse(file, f"the model must be next to it, not in {folder!r:.80}")
    return modules


def _pooling(file: Path) -> Literal["last", "mean"]:
    config = _read(file)
    prefix = "pooling_mode_"
    chosen = [
        name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value
    ]
    named = config.get("pooling_mode")
    chosen += [named] if isinstance(named, str) else list(named or ())
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        modes = ", ".join(map(str, chosen)) or "none"
        _refuse(file, f"pooling {modes:.80} is not supported (supported: lasttoken or mean_tokens)")
    return POOLINGS[chosen[0]]


def _max_tokens(file: Path) -> int | None:
    config = _read(file)
    if config.get("do_lower_case"):
        _refuse(file, "do_lower_case is not supported")
    length = config.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        _refuse(file, f"max_seq_length must be a positive integer, not {length!r:.80}")
    return length


def _dimensions(file: Path) -> tuple[int, ...]:
    values = _read(file).get("matryoshka_dimensions") or []
    if not isinstance(values, list) or not all(type(value) is int and value > 0 for value in values):
        _refuse(file, "matryoshka_dimensions must be a list of positive integers")
    return tuple(values)


def _gguf_pooling(file: Path) -> int:
    metadata = open_gguf(file).metadata
    return metadata.integer(f"{metadata.text('general.architecture')}.pooling_type", 0, minimum=0)


def _gguf_kind(file: Path) -> Literal["last", "mean"]:
    pooling = _gguf_pooling(file) or 3
    if pooling not in GGUF_POOLINGS:
        _refuse(file, f"pooling_type {pooling} is not supported (supported: 1 for mean, 3 for last)")
    return GGUF_POOLINGS[pooling]


def _read(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no file."""
    content = _load(file) if file.exists() else {}
    if not isinstance(content, dict):
        _refuse(file, "must hold a JSON object")
    return content


def _load(file: Path) -> Any:
    try:
        if file.stat().st_size > MAX_BYTES:
            _refuse(file, f"has more than {MAX_BYTES >> 20} MiB")
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        _refuse(file, f"cannot be read: {error}")


def _refuse(file: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{file}: {reason}")
