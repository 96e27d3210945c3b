"""Hashes of a checkpoint's tokenizer and vocabulary, by which two checkpoints are compared."""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from streamserve.execution.formats.gguf.vocabulary import read_vocabulary
from streamserve.gguf.paths import gguf_file
from streamserve.protocol.errors import CheckpointError

TOKENIZER = "tokenizer.json"


def fingerprints(folder: Path, vocab_size: int) -> tuple[str, str]:
    """Return the hashes of the tokenization rules and of the vocabulary (texts and ids). For a folder without
    a fast tokenizer the first one is "", and the second one covers the vocabulary's size only. Raises
    CheckpointError if the tokenizer file cannot be read."""
    file = gguf_file(folder)
    if file:
        tokens, rules = read_vocabulary(file)
        return _digest(rules), _digest([vocab_size, tokens])
    path = folder / TOKENIZER
    if not path.exists():
        return "", _digest(vocab_size)
    try:
        content = json.loads(path.read_bytes())
        model = dict(content["model"])
        vocabulary = [vocab_size, model.pop("vocab"), content.get("added_tokens")]
        tokenization = [model, content.get("normalizer"), content.get("pre_tokenizer")]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _digest(tokenization), _digest(vocabulary)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).hexdigest()
