"""The embedded pair: a tiny Llama target and its draft, shipped as files inside the package.

Both are Hugging Face folders (``config.json``, ``model.safetensors``, tokenizer files). ``MODEL_CARD.md``
in the same folder describes how they were made and what they can and cannot do.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["NAMES", "path"]

_FOLDERS = {"embedded": "target", "embedded-draft": "draft"}
NAMES: tuple[str, ...] = tuple(_FOLDERS)


def path(name: str) -> Path:
    """Return the folder of the embedded model named `name`.

    Raises ValueError for a name that is not embedded, and FileNotFoundError when the files are missing,
    as in a checkout whose models were never exported.
    """
    if name not in _FOLDERS:
        raise ValueError(f"unknown embedded model {name!r}; available: {', '.join(NAMES)}")
    folder = Path(__file__).resolve().parent / _FOLDERS[name]
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"the files of {name!r} are missing from {folder}: create them with packaged_model/train.py"
        )
    return folder
