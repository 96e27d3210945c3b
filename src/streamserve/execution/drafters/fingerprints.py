"""Whether two checkpoints speak the very same tokens, told by two short texts that can be sent."""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from streamserve.protocol.errors import CheckpointError

TOKENIZER = "tokenizer.json"


def fingerprints(folder: Path, vocab_size: int) -> tuple[str, str]:
    """Of how text is cut into tokens, and of the tokens' texts and ids; "" of a folder without a tokenizer of
    the fast kind, but for the vocabulary's size. Raises CheckpointError if its file cannot be read."""
    path = folder / TOKENIZER
    if not path.exists():
        return "", _digest(vocab_size)
    try:
        read = json.loads(path.read_bytes())
        model = dict(read["model"])
        vocabulary = [vocab_size, model.pop("vocab"), read.get("added_tokens")]
        cutting = [model, read.get("normalizer"), read.get("pre_tokenizer")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _digest(cutting), _digest(vocabulary)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).hexdigest()
