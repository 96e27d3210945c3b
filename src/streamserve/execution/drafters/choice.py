"""Parse `--draft`, and check it against the target. A draft model must have exactly the same vocabulary,
except for rows of its embedding that have no text."""

import json
from dataclasses import dataclass
from pathlib import Path

from streamserve.execution.backends.native.structures import MAX_QUERY_GROUP
from streamserve.execution.formats.gguf.vocabulary import VOCABULARY, read_vocabulary
from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.model.spec import ModelSpec
from streamserve.gguf.paths import gguf_file
from streamserve.protocol.draft_kind import FIRST_LAYERS_PREFIX, DraftKind, draft_kind
from streamserve.protocol.errors import CheckpointError

TOKENIZER = "tokenizer.json"
UNUSED = 5
"""GGUF's number for the type of unused tokens, which have no text."""


@dataclass(frozen=True)
class DraftChoice:
    """The drafter to load: of FIRST_LAYERS, the number of `layers`; of a MODEL, its `folder` and `spec`. A
    SERVICE is not loaded: the worker connects to it."""

    kind: DraftKind
    layers: int = 0
    folder: Path = Path()
    spec: ModelSpec | None = None


NO_DRAFT = DraftChoice(DraftKind.NONE)


def choose_draft(draft: str, target: Path, spec: ModelSpec) -> DraftChoice:
    """Return the drafter for the checkpoint `target` with `spec`. `draft` is none, ngram, self:K, tcp://… or
    a folder; auto means none here, because it is resolved with the other settings before. Raises
    CheckpointError, which names both models, for a draft model that does not fit."""
    kind = draft_kind(draft)
    if kind is DraftKind.MODEL:
        return _model(Path(draft), target, spec)
    if kind is DraftKind.FIRST_LAYERS:
        layers = draft.removeprefix(FIRST_LAYERS_PREFIX)
        if not (layers.isascii() and layers.isdigit() and 1 <= int(layers) < spec.num_layers):
            raise CheckpointError(
                f"--draft {draft}: self:K takes 1 to {spec.num_layers - 1} of the {spec.num_layers} layers"
            )
        return DraftChoice(kind, layers=int(layers))
    return NO_DRAFT if kind is DraftKind.AUTO else DraftChoice(kind)


def _model(folder: Path, target: Path, spec: ModelSpec) -> DraftChoice:
    draft_spec, _ = open_checkpoint(folder)
    if (gguf_file(folder) is None) != (gguf_file(target) is None):
        raise CheckpointError(
            f"--draft {folder} and {target} must both be GGUF files, or neither of them: otherwise their "
            "vocabularies cannot be compared"
        )
    vocabulary = _vocabulary(folder)
    if vocabulary != _vocabulary(target):
        raise CheckpointError(
            f"--draft {folder} has another vocabulary than {target}: compare their {TOKENIZER}"
        )
    if draft_spec.vocab_size != spec.vocab_size:
        _check_padding(vocabulary, f"--draft {folder}", draft_spec.vocab_size, f"{target}", spec.vocab_size)
    if draft_spec.num_heads // draft_spec.num_kv_heads > MAX_QUERY_GROUP:
        raise CheckpointError(
            f"--draft {folder}: more than {MAX_QUERY_GROUP} query heads share a key-value head"
        )
    return DraftChoice(DraftKind.MODEL, folder=folder, spec=draft_spec)


@dataclass(frozen=True)
class _Vocabulary:
    """A vocabulary: the tokens' texts and ids in a form that can be compared, and the number of ids in
    use."""

    tokens: object
    count: int


def _check_padding(
    vocabulary: _Vocabulary | None, draft: str, draft_rows: int, target: str, target_rows: int
) -> None:
    """Raise CheckpointError unless the rows that only one of the models has are padding, without a text."""
    shown = f"{draft} has a vocabulary of {draft_rows} tokens, {target} one of {target_rows}"
    if vocabulary is None:
        raise CheckpointError(
            f"{shown}: without a {TOKENIZER} in both, their vocabularies must have the same size"
        )
    if vocabulary.count > min(draft_rows, target_rows):
        raise CheckpointError(
            f"{shown}: both need a row for each of the tokenizer's {vocabulary.count} tokens"
        )


def _vocabulary(folder: Path) -> _Vocabulary | None:
    """Return the vocabulary of a checkpoint; None if it has no fast tokenizer."""
    file = gguf_file(folder)
    if file:
        return _of_gguf(file)
    path = folder / TOKENIZER
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
        tokens, added = content["model"]["vocab"], content.get("added_tokens")
        ids = [*(tokens.values() if isinstance(tokens, dict) else range(len(tokens)))]
        ids += [token["id"] for token in added or ()]
        return _Vocabulary((tokens, added), 1 + max(ids, default=-1))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _of_gguf(file: Path) -> _Vocabulary:
    """Return the vocabulary of a GGUF file, without the unused tokens at its end, which are padding."""
    entries = read_vocabulary(file)[0]
    tokens, types = (entries[name] or [] for name in VOCABULARY)
    count = len(tokens)
    while 0 < count <= len(types) and types[count - 1] == UNUSED:
        count -= 1
    return _Vocabulary((tokens[:count], types[:count]), count)
