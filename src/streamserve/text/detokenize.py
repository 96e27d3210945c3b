"""Token ids to text as they come: what is handed out is final, and together it is the decoded whole."""

import codecs
from typing import Protocol

from streamserve.text.tokenizer import Tokenizer

_MAX_OPEN = 4
"""A character has at most 4 bytes, so more tokens than that don't complete one."""


class Detokenizer(Protocol):
    """Turns one choice's tokens into text. Constant work per token, however long the text."""

    def feed(self, token: int) -> str:
        """The text that is certain now and wasn't before."""

    def flush(self) -> str:
        """What is left at the end, unfinished characters written as U+FFFD."""


def detokenizer(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> Detokenizer:
    """The right kind for `tokenizer`. Fed `ids` and flushed, it gives `tokenizer.decode(ids)`.

    The one exception: a decoder that chains byte-level reading with further steps may read bytes that are
    no UTF-8 differently in pieces than as a whole.
    """
    kind = _ByteLevel if tokenizer.byte_level else _Windowed
    return kind(tokenizer, skip_special_tokens)


class _ByteLevel:
    """Tokens are bytes of UTF-8, so the text is their incremental reading."""

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
    """Decodes a short window: tokens whose text is out, for context, and those after them.

    The first tokens of a decoded piece lose their leading space, so a token is only ever read after
    another one. Byte pieces stay open until the run of them ends: one wrong byte spoils its whole run.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._read = 0
        self._shown = ""

    def feed(self, token: int) -> str:
        if not self._tokenizer.token_bytes(token) or (self._skip and self._tokenizer.is_special(token)):
            return ""
        self._window.append(token)
        return "" if self._tokenizer.is_byte_piece(token) else self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        fresh = self._decode()[len(self._shown) :]
        few = len(self._window) - self._read < _MAX_OPEN
        unfinished = few and fresh.endswith("\N{REPLACEMENT CHARACTER}")
        if not fresh or (unfinished and not final):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._shown = self._decode()
        return fresh

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
