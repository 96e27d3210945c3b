"""The tokenizer's entries in a GGUF file, for comparing the tokenizers of two models."""

from pathlib import Path
from typing import Any

import numpy as np

from streamserve.gguf.files import open_gguf

PREFIX = "tokenizer.ggml."
VOCABULARY = (PREFIX + "tokens", PREFIX + "token_type")


def read_vocabulary(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries that define the tokens, and the entries that define how a text is divided into
    tokens."""
    entries = open_gguf(file).metadata.entries
    values = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in entries.items()
        if key.startswith(PREFIX)
    }
    tokens = {key: values.pop(key, None) for key in VOCABULARY}
    return tokens, values
