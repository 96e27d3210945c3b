"""Write checkpoint folders: safetensors shards with their index, and copies of a model's other files."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from streamserve.execution.formats.checkpoint import INDEX

COPIED = (".json", ".jinja", ".model", ".txt")
"""Suffixes of the files that are copied with a model. Weights and code are not copied."""
LICENSES = ("license", "notice")
"""Name prefixes, in lower case, of files that are copied whatever their suffix."""


def copy_other_files(source: Path, target: Path) -> None:
    """Copy the tokenizer, configs, templates and licenses of the folder `source` to the folder `target`."""
    for file in source.iterdir():
        belongs = file.suffix in COPIED or file.name.lower().startswith(LICENSES)
        if file.is_file() and belongs and file.name != INDEX:
            shutil.copyfile(file, target / file.name)


def write_shards(target: Path, shards: Iterable[Mapping[str, Tensor]], count: int) -> None:
    """Write `count` shards, each a mapping of names to tensors, and their index. Each shard is written before
    the next one is taken from `shards`, so that one shard is in memory at a time."""
    total, weight_map = 0, dict[str, str]()
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(dict(tensors), target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for name in set(weight_map.values()):  # safetensors creates files that only their owner can read
        shutil.copymode(target / INDEX, target / name)
