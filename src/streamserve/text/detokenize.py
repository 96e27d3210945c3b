"""Incremental detokenization: every piece of text is final, and together they equal the decoded whole."""

import codecs
from typing import Protocol

from streamserve.text.tokenizer import Tokenizer

_MAX_OPEN = 4
"""A character has at most 4 bytes, so no more tokens are needed to complete one."""


class Detokenizer(Protocol):
    """Converts one choice's tokens to text. Work per token is constant, however long the text."""

    def feed(self, token: int) -> str:
        """Return the text that this token makes final."""

    def flush(self) -> str:
        """Return the remaining text at the end, with incomplete characters as U+FFFD."""


def detokenizer(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> Detokenizer:
    """Return the detokenizer for `tokenizer`: all `ids` fed and flushed give `tokenizer.decode(ids)`.

    The one exception: a decoder that chains byte-level decoding with further steps may decode invalid UTF-8
    differently in pieces than as a whole.
    """
    kind = _ByteLevel if tokenizer.byte_level else _Windowed
    return kind(tokenizer, skip_special_tokens)


class _ByteLevel:
    """For byte-level tokens: the text is their incremental UTF-8 decoding."""

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
    """Decodes a short window: tokens whose text has been returned, for context, and those after them.

    The first tokens of a decoded piece lose their leading space, so a token is only ever decoded after
    another one. Byte tokens stay pending until their run ends: one invalid byte affects its whole run.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._read = 0
        self._emitted = ""

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
