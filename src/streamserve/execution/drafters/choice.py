"""Parse `--draft` and validate it against the target: a draft model must have exactly the same vocabulary."""

import json
from dataclasses import dataclass
from pathlib import Path

from streamserve.execution.gguf.vocabulary import read_vocabulary
from streamserve.execution.native.attention import MAX_QUERY_GROUP
from streamserve.execution.open import open_checkpoint
from streamserve.execution.spec import ModelSpec
from streamserve.gguf.paths import gguf_file
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


NO_DRAFT = DraftChoice("none")


def choose_draft(draft: str, target: Path, spec: ModelSpec) -> DraftChoice:
    """Return the drafter for the checkpoint `target` of shape `spec`. `draft` is none, ngram, self:K, tcp://…
    or a folder; auto is resolved with the other settings, so here it means none. Raises CheckpointError,
    naming both sides, for a draft that does not fit."""
    if draft in ("auto", "none"):
        return NO_DRAFT
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
    draft_spec, _ = open_checkpoint(folder)
    if draft_spec.vocab_size != spec.vocab_size:
        raise CheckpointError(
            f"--draft {folder} has a vocabulary of {draft_spec.vocab_size} tokens, {target} one of "
            f"{spec.vocab_size}: they must be the same"
        )
    if (gguf_file(folder) is None) != (gguf_file(target) is None):
        raise CheckpointError(
            f"--draft {folder} and {target} must both be GGUF files, or neither: only then are their "
            "vocabularies compared"
        )
    if _vocabulary(folder) != _vocabulary(target):
        raise CheckpointError(
            f"--draft {folder} has another vocabulary than {target}: compare their {TOKENIZER}"
        )
    if draft_spec.num_heads // draft_spec.num_kv_heads > MAX_QUERY_GROUP:
        raise CheckpointError(
            f"--draft {folder}: more than {MAX_QUERY_GROUP} query heads share a key-value head"
        )
    return DraftChoice("model", folder=folder, spec=draft_spec)


def _vocabulary(folder: Path) -> object:
    """Return the tokens' texts and ids; None where a checkpoint has no fast tokenizer."""
    file = gguf_file(folder)
    if file:
        return read_vocabulary(file)[0]
    path = folder / TOKENIZER
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
        return content["model"]["vocab"], content.get("added_tokens")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
