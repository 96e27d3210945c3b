"""Texts of special tokens: where they occur in a text, and how they are encoded as ordinary text."""

import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import models

from streamserve.text.panics import refusing_panics

Span = tuple[int, int]
"""Start and end of a part of a text, in characters."""

_EXACT = ("Prepend", "Replace")
"""Normalizers after which a special token occurs only where its text occurred before."""


class SpecialTexts:
    """The special tokens of a tokenizer of the library `tokenizers`. `unknown` is the id of the token for
    unknown characters, which ordinary text may have."""

    def __init__(self, backend: tokenizers.Tokenizer, unknown: int | None) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = [entry for entry in added.values() if not entry.special]
        self._special = {token: entry for token, entry in added.items() if entry.special and entry.content}
        self._control = frozenset(self._special) - {unknown}

    def spans(self, text: str) -> list[Span]:
        """Return the parts of `text` that `encode` converts to special tokens. May raise ValueError for text
        that is not Unicode."""
        if self._depends_on_pipeline:
            text.encode()  # raises a ValueError, where the library raises TypeError
            with refusing_panics():
                encoding = self._backend.encode(text, add_special_tokens=False)
            found = zip(encoding.ids, encoding.offsets, strict=True)
            return [span for token, span in found if token in self._control and span[0] < span[1]]
        return [match.span() for match in self._pattern.finditer(text)] if self._special else []

    @cached_property
    def prefixes_segments(self) -> bool:
        """Whether `encode` adds a space to the text after each added token, and `encode_ordinary` adds none.
        Then the tokens of a text depend on what is ordinary before it."""
        parts = _parts(self._backend.pre_tokenizer, "pretokenizers")
        return bool(self._added) and any(part.get("add_prefix_space") for part in parts)

    def encode_ordinary(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of texts within a prompt. None of them is a special token."""
        with refusing_panics():
            encoded = [self._ids(encoding) for encoding in self._ordinary.encode_batch_fast(texts)]
        return [
            self._by_character(text) if self._control.intersection(ids) else ids
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def _by_character(self, text: str) -> list[int]:
        """Encode a text character by character. Used for the text of a control token that the model's
        vocabulary also has as a token: encoded as a whole, it would become this token."""
        ids = [
            token
            for encoding in self._ordinary.encode_batch_fast(list(text))
            for token in self._ids(encoding)
        ]
        return [token for token in ids if token not in self._control]

    def _ids(self, encoding: Any) -> list[int]:
        return [self._numbers.get(token, token) for token in encoding.ids]

    @cached_property
    def _depends_on_pipeline(self) -> bool:
        """Whether `encode` may find a special token where its text does not occur: a normalizer or the model
        may convert other text to it."""
        if isinstance(self._backend.model, models.Unigram):
            return True
        kinds = {part["type"] for part in _parts(self._backend.normalizer, "normalizers")}
        return bool(kinds.difference(_EXACT)) and any(entry.normalized for entry in self._special.values())

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(alternation(entry.content for entry in self._special.values()))

    @cached_property
    def _ordinary(self) -> tokenizers.Tokenizer:
        """A tokenizer that shares the model, without special tokens, and without a space before a text."""
        normalizer = _parts(self._backend.normalizer, "normalizers")
        pre_tokenizer = _parts(self._backend.pre_tokenizer, "pretokenizers")
        description: dict[str, Any] = {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": {
                "type": "Sequence",
                "normalizers": [part for part in normalizer if part["type"] != "Prepend"],
            },
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(map(_without_prefix, pre_tokenizer))},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "BPE", "vocab": {}, "merges": []},
        }
        ordinary = tokenizers.Tokenizer.from_str(json.dumps(description))
        ordinary.model = self._backend.model
        ordinary.add_tokens(self._added)
        return ordinary

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """The ids of added tokens, by their ids in `_ordinary`."""
        here, there = (each.get_added_tokens_decoder() for each in (self._ordinary, self._backend))
        texts = {entry.content: token for token, entry in there.items()}
        return {token: texts[entry.content] for token, entry in here.items()}


def alternation(texts: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of `texts`. Common prefixes are matched once."""
    by_character: dict[str, list[str]] = {}
    ends = False
    for text in texts:
        if text:
            by_character.setdefault(text[0], []).append(text[1:])
        else:
            ends = True
    branches = [re.escape(first) + alternation(rest) for first, rest in by_character.items()]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if ends else ''}" if ends or len(branches) > 1 else branches[0]


def _parts(part: Any, name: str) -> list[dict[str, Any]]:
    """Return the parts of a normalizer or pre-tokenizer from its JSON description."""
    if part is None:
        return []
    description: dict[str, Any] = json.loads(part.__getstate__())
    return list(description[name]) if description["type"] == "Sequence" else [description]


def _without_prefix(part: dict[str, Any]) -> dict[str, Any]:
    """Return a pre-tokenizer that adds no space before a text."""
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    return {**part, "prepend_scheme": "never"} if part["type"] == "Metaspace" else part
