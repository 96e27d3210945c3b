"""Parse `--draft` and validate it against the target: a draft model must have exactly the same vocabulary."""

import json
from dataclasses import dataclass
from pathlib import Path

from streamserve.execution.checkpoint import Checkpoint
from streamserve.execution.native.attention import MOST_QUERIES
from streamserve.execution.spec import ModelSpec, read_spec
from streamserve.execution.weights import check_weights
from streamserve.protocol.errors import CheckpointError

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class DraftChoice:
    """The drafter to load. `kind` is none, ngram, self (the target's first `layers`), model (at `folder`, of
    shape `spec`), or remote: a draft service, to which the target's server connects."""

    kind: str
    layers: int = 0
    folder: Path = Path()
    spec: ModelSpec | None = None


NONE = DraftChoice("none")


def choose_draft(draft: str, target: Path, spec: ModelSpec) -> DraftChoice:
    """Return the drafter for the checkpoint `target` of shape `spec`. `draft` is none, ngram, self:K, tcp://…
    or a folder; auto is resolved with the other settings, so here it means none. Raises CheckpointError,
    naming both sides, for a draft that does not fit."""
    if draft in ("auto", "none"):
        return NONE
    if draft == "ngram" or draft.startswith("tcp://"):
        return DraftChoice("ngram" if draft == "ngram" else "remote")
    if draft.startswith("self:"):
        layers = draft.removeprefix("self:")
        if not (layers.isascii() and layers.isdigit() and 1 <= int(layers) < spec.num_layers):
            raise CheckpointError(
                f"--draft {draft}: self:K takes 1 to {spec.num_layers - 1} of the {spec.num_layers} layers"
            )
        return DraftChoice("self", layers=int(layers))
    return _model(Path(draft), target, spec)


def _model(folder: Path, target: Path, spec: ModelSpec) -> DraftChoice:
    small = read_spec(folder)
    check_weights(Checkpoint(folder), small)
    if small.vocab_size != spec.vocab_size:
        raise CheckpointError(
            f"--draft {folder} has a vocabulary of {small.vocab_size} tokens, {target} one of "
            f"{spec.vocab_size}: they must be the same"
        )
    if _vocabulary(folder) != _vocabulary(target):
        raise CheckpointError(
            f"--draft {folder} names its tokens otherwise than {target}: compare {TOKENIZER}"
        )
    if small.num_heads // small.num_kv_heads > MOST_QUERIES:
        raise CheckpointError(
            f"--draft {folder}: more than {MOST_QUERIES} query heads share a key-value head"
        )
    return DraftChoice("model", folder=folder, spec=small)


def _vocabulary(folder: Path) -> object:
    """Return the tokens' texts and ids; None where a checkpoint has no fast tokenizer."""
    path = folder / TOKENIZER
    if not path.exists():
        return None
    try:
        read = json.loads(path.read_bytes())
        return read["model"]["vocab"], read.get("added_tokens")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
