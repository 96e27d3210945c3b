"""Find the tokens that end a text, in the files of a model's folder that name them."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from streamserve.execution.model.fields import Fields, read_fields, shown

log = logging.getLogger(__name__)

MAX_DIGITS = 10
"""Maximum length of a decimal token id."""


def end_of_text_ids(folder: Path, config: Fields, default: int | None, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of all tokens that `config`, generation_config.json or the tokenizer's files name as
    ends of a text. Chat models often list their end-of-turn token in only one of these files. Ids outside of
    the vocabulary are left out with a warning.

    `default` is the id in transformers' configuration class. As in transformers, it is used if `config` lacks
    the field (null means none) and generation_config.json names no id. Raises CheckpointError for a value
    that is not an id.
    """
    named = [*_field_ids(config)]
    if (folder / "generation_config.json").exists():
        named += _field_ids(read_fields(folder / "generation_config.json"))
    if not named and "eos_token_id" not in config.values and default is not None:
        named.append((f"{config.name}: the default of eos_token_id", default))
    named += _tokenizer_ids(folder)
    return within_vocabulary(named, vocab_size)


def within_vocabulary(named: Iterable[tuple[str, int]], vocab_size: int) -> tuple[int, ...]:
    """Return the sorted ids of `named`, which has pairs of the place that names an id and the id. An id
    outside of the vocabulary is left out with a warning: the model cannot generate it."""
    ids = set[int]()
    for where, token in named:
        if 0 <= token < vocab_size:
            ids.add(token)
        else:
            log.warning(
                "%s: end-of-text id %s is ignored: it is not among the model's %d tokens",
                where, shown(token), vocab_size,
            )  # fmt: skip
    return tuple(sorted(ids))


def _field_ids(source: Fields) -> Iterator[tuple[str, int]]:
    """Yield the ids in a file's field eos_token_id, which has one id, a list, or none."""
    value = source.get("eos_token_id")
    for token in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(token, bool) or not isinstance(token, int):
            source.refuse("eos_token_id", f"{shown(token)} is not a token id")
        yield f"{source.name}: eos_token_id", token


def _tokenizer_ids(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the id of the tokenizer's eos_token, if there is one."""
    if not (folder / "tokenizer_config.json").exists():
        return
    settings = read_fields(folder / "tokenizer_config.json")
    text = _eos_text(folder, settings)
    token = None if text is None else _added_id(settings, text)
    if text is not None and token is None and (folder / "tokenizer.json").exists():
        token = _vocabulary_id(read_fields(folder / "tokenizer.json"), text)
    if token is not None:
        yield f"{settings.name}: eos_token", token


def _eos_text(folder: Path, settings: Fields) -> str | None:
    """Return the text of the eos_token; None if there is none. Older folders have it in a separate file."""
    value, older = settings.get("eos_token"), folder / "special_tokens_map.json"
    if "added_tokens_decoder" not in settings.values and older.exists():
        value = read_fields(older).get("eos_token", value)
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _added_id(settings: Fields, text: str) -> int | None:
    """Return the id of the token `text` in the table of added tokens; None if it is not there. The table is
    tried first, because it is much smaller than the vocabulary."""
    table = settings.nested("added_tokens_decoder")
    for key, entry in table.values.items() if table else ():
        is_id = key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS
        if is_id and isinstance(entry, dict) and entry.get("content") == text:
            return int(key)
    return None


def _vocabulary_id(tokenizer: Fields, text: str) -> int | None:
    """Return the id of the token `text` in tokenizer.json, among its added tokens or in its vocabulary; None
    if it is not there. The vocabulary is a mapping to ids, or a list of (text, score)."""
    for entry in tokenizer.get("added_tokens") or ():
        if isinstance(entry, dict) and entry.get("content") == text and type(entry.get("id")) is int:
            return int(entry["id"])
    model = tokenizer.nested("model")
    vocabulary = model.get("vocab") if model else None
    if isinstance(vocabulary, dict):
        token = vocabulary.get(text)
        return token if type(token) is int else None
    pieces = vocabulary if isinstance(vocabulary, list) else []
    return next(
        (token for token, piece in enumerate(pieces) if isinstance(piece, list) and piece[:1] == [text]), None
    )
