"""Incremental detokenization: every piece of text is final, and the pieces together equal the text decoded as
a whole."""

import codecs
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from streamserve.text.tokenizer import Tokenizer

_MAX_OPEN = 4
"""A character has at most 4 bytes, so 4 tokens suffice to complete one."""

_MAX_SEARCHED = 256
"""Number of the prompt's last tokens that are searched for one with text."""


class Detokenizer(Protocol):
    """Converts one choice's tokens to text. The work per token is constant, however long the text."""

    def feed(self, token: int) -> str:
        """Return the text that is final now that this token is known."""

    def flush(self) -> str:
        """Return the remaining text at the end. Incomplete characters become U+FFFD."""


def detokenizer(
    tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = ()
) -> Detokenizer:
    """Return the detokenizer for `tokenizer`: feeding all `ids` and flushing gives `tokenizer.decode(ids)`.
    There is one exception: a decoder that combines byte-level decoding with further steps may decode invalid
    UTF-8 in pieces differently than as a whole.

    If the tokens continue the text of a `prompt`, a space at their start is part of their text.
    """
    if tokenizer.byte_level:
        return _ByteLevel(tokenizer, skip_special_tokens)
    return _Windowed(tokenizer, skip_special_tokens, _context(tokenizer, prompt))


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Return the last token of a prompt that has text, as context for decoding; no token if a special token
    comes after it, because a text begins there.

    A token of a single byte of a longer character is skipped: its other bytes would be missing.
    """
    for token in islice(reversed(prompt), _MAX_SEARCHED):
        if tokenizer.is_special(token):
            return []
        data = tokenizer.token_bytes(token)
        if data and (data.isascii() or not tokenizer.is_byte_piece(token)):
            return [token]
    return []


class _ByteLevel:
    """For byte-level tokens: the text is the incremental UTF-8 decoding of their bytes."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._reader = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        if self._skip and self._tokenizer.is_special(token):
            return ""
        return self._reader.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        text = self._reader.decode(b"", final=True)
        self._reader.reset()
        return text


class _Windowed:
    """Decodes a short window of tokens. Its first tokens, whose text has been returned already, are only
    context for the others.

    The first token of a decoded piece loses its leading space, so a token is only decoded after another one.
    Byte tokens stay pending until their run ends: one invalid byte affects the whole run.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = context
        self._read = len(context)
        self._emitted = self._decode()

    def feed(self, token: int) -> str:
        if not self._tokenizer.token_bytes(token) or (self._skip and self._tokenizer.is_special(token)):
            return ""
        self._window.append(token)
        return "" if self._tokenizer.is_byte_piece(token) else self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        new = self._decode()[len(self._emitted) :]
        few = len(self._window) - self._read < _MAX_OPEN
        unfinished = few and new.endswith("\N{REPLACEMENT CHARACTER}")
        if not new or (unfinished and not final):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._emitted = self._decode()
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
