"""Tokenizer of a checkpoint folder: text to ids and back, consistent with transformers' AutoTokenizer."""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers

from streamserve.gguf.files import open_gguf
from streamserve.gguf.paths import gguf_file
from streamserve.protocol.errors import CheckpointError
from streamserve.text.byte_level import byte_of_character
from streamserve.text.chat import Renderer, chat_template
from streamserve.text.folder import TokenizerFolder, read_folder
from streamserve.text.gguf import read_tokenizer
from streamserve.text.mistral import MistralBackend, MistralTemplate, mistral_file
from streamserve.text.panics import refusing_panics
from streamserve.text.prompt_text import PromptText
from streamserve.text.special_text import Span, SpecialTexts

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A checkpoint's tokenizer. `encode` adds the special tokens that `tokenizer.json` defines.

    `special_tokens` maps names ("bos_token", "eos_token", …) to texts. `chat_template` is the Jinja source of
    the chat template, and `tool_template` the source for conversations with tools, if it differs. A tokenizer
    without a chat template may have a `renderer` instead. Thread-safe.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | MistralBackend,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
        renderer: Renderer | None = None,
        tool_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._tool_template = tool_template
        self._renderer = renderer
        self._backend = backend
        self._name_special_tokens()
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self._decoder_parts = _decoder_parts(backend.decoder)
        self._character_bytes = byte_of_character()
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, path: str | Path, template: str | None = None) -> "Tokenizer":
        """Load the tokenizer of a folder in Hugging Face layout, or of a GGUF file. `template` is a chat
        template in place of the model's own.

        Raises CheckpointError if there is no readable tokenizer, or if it takes no template.
        """
        tokenizer = cls._from_files(path)
        if template is not None:
            tokenizer.check_takes_template()
            tokenizer.chat_template, tokenizer._tool_template = template, None
        return tokenizer

    @classmethod
    def _from_files(cls, path: str | Path) -> "Tokenizer":
        file = gguf_file(Path(path))
        folder = None if file else read_folder(Path(path))
        try:
            if folder:
                return cls._from_settings(folder)
            assert file
            read = read_tokenizer(open_gguf(file))
            return cls(
                read.backend, read.special_tokens, read.chat_template, tool_template=read.tool_template
            )
        except CheckpointError:
            raise
        except Exception as error:  # token names that are not Unicode, or inconsistent parts
            raise CheckpointError(f"{path}: its tokenizer cannot be used: {error}") from error

    @classmethod
    def _from_settings(cls, folder: TokenizerFolder) -> "Tokenizer":
        file = None if folder.tokenizer_file.exists() else mistral_file(folder.path)
        if file is not None:
            own = MistralBackend(file)
            return cls(own, own.special_tokens, renderer=MistralTemplate(own))
        templates = (folder.chat_template, None, folder.tool_template)
        if not folder.tokenizer_file.exists():
            return cls(_converted_backend(folder), folder.special_tokens, *templates)
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder.tokenizer_file))
        except Exception as error:  # the library raises plain instances of Exception
            raise CheckpointError(f"{folder.tokenizer_file} cannot be read: {error}") from error
        tokenizer = cls(backend, folder.special_tokens, *templates)
        if folder.llama_class and not tokenizer.byte_level:
            _rebuild_as_llama(backend, folder)
            tokenizer = cls(backend, folder.special_tokens, *templates)
        return tokenizer

    @property
    def template_signs(self) -> str | None:
        """The text from which the formats of tool calls and reasoning are detected: chat templates or special
        tokens."""
        if isinstance(self._backend, MistralBackend):
            return self._backend.signs
        return self.chat_template and self.chat_template + (self._tool_template or "")

    def check_takes_template(self) -> None:
        """Raise CheckpointError if conversations cannot be rendered by another template."""
        if self._renderer is not None:
            raise CheckpointError(
                "chat_template: this model's tokenizer (Mistral's tekken.json or tokenizer.model) renders "
                "conversations itself: leave the template out"
            )

    def renderer(self) -> Renderer | None:
        """Return the renderer of conversations; None if there is none.

        Raises CheckpointError if a chat template does not compile.
        """
        return self._renderer or chat_template(self.chat_template, self.special_tokens, self._tool_template)

    def _name_special_tokens(self) -> None:
        """Mark the folder's named special tokens as special, where `tokenizer.json` does not."""
        marked = {str(entry) for entry in self._backend.get_added_tokens_decoder().values() if entry.special}
        missing = [text for text in self.special_tokens.values() if text not in marked]
        if missing:
            self._backend.add_special_tokens(
                [AddedToken(text, special=True, normalized=False) for text in missing]
            )

    @cached_property
    def vocab_size(self) -> int:
        """The number of tokens, including added ones. The model's vocabulary may be larger (padding)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """The length of the longest token in characters. A text longer than n times this has more than n
        tokens."""
        return max((len(piece) for piece in self._backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def description(self) -> dict[str, Any]:
        """Return the tokenization pipeline in the format of `tokenizer.json`, including the vocabulary."""
        described: dict[str, Any] = json.loads(self._backend.to_str())
        return described

    @cached_property
    def added_special_tokens(self) -> tuple[list[int], list[int]]:
        """The special tokens that `encode` adds before and after every text."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        before = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:before], whole[before + len(plain) :]

    @property
    def byte_level(self) -> bool:
        """Whether a text is exactly the UTF-8 decoding of its tokens' concatenated bytes."""
        return {part["type"] for part in self._decoder_parts} - {"Fuse"} == {"ByteLevel"}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens written in it are recognized.

        Raises ValueError for text that is not Unicode (lone surrogates).
        """
        text.encode()  # raises UnicodeEncodeError, a ValueError, where the library raises TypeError
        with refusing_panics():
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_without_gil(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return `encode` of each text, releasing the GIL meanwhile; for use in threads."""
        for text in texts:
            text.encode()
        with refusing_panics():
            encoded = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encoded]

    def encode_prompt(self, prompt: PromptText, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt, as `encode` does. Its literal parts become no special tokens.

        Raises ValueError for text that is not Unicode.
        """
        if not prompt.literal:
            return self.encode(prompt.text, add_special_tokens)
        return self.encode_prompt_without_gil(prompt, add_special_tokens)

    def encode_prompt_without_gil(self, prompt: PromptText, add_special_tokens: bool = True) -> list[int]:
        """Return `encode_prompt`, releasing the GIL meanwhile; for use in threads."""
        if not prompt.literal:
            return self.encode_without_gil([prompt.text], add_special_tokens)[0]
        assert self._special_texts
        parts = [part for part in prompt.parts(self._special_texts.spans) if part[0]]
        plain = iter(self.encode_without_gil([text for text, ordinary in parts if not ordinary], False))
        ordinary = iter(self._special_texts.encode_ordinary([text for text, ordinary in parts if ordinary]))
        before, after = self.added_special_tokens if add_special_tokens else ([], [])
        ids = [token for _, literal in parts for token in next(ordinary if literal else plain)]
        return before + ids + after

    def special_spans(self, text: str) -> list[Span]:
        """Return the parts of `text` that `encode` converts to special tokens."""
        return self._special_texts.spans(text) if self._special_texts else []

    @property
    def prefixes_segments(self) -> bool:
        """Whether the tokens of a part of a prompt depend on literal parts before it."""
        return self._special_texts is not None and self._special_texts.prefixes_segments

    def literal(self, text: str) -> PromptText:
        """Return a text in which no special tokens are recognized."""
        return PromptText(text, tuple(self.special_spans(text)))

    @cached_property
    def _special_texts(self) -> SpecialTexts | None:
        """None if `encode` recognizes no special tokens."""
        if isinstance(self._backend, MistralBackend):
            return None
        return SpecialTexts(self._backend, self._named_id("unk_token"))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Ids outside of the vocabulary have no text."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def is_special(self, token: int) -> bool:
        """Return whether `token` is the id of a special token."""
        return token in self._special_ids

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token `text`; None if `text` is not a special token."""
        token = self._backend.token_to_id(text)
        return token if token is not None and self.is_special(token) else None

    def is_byte_piece(self, token: int) -> bool:
        """Return whether `token` stands for a single byte (byte fallback for characters without a token)."""
        return self._falls_back_to_bytes and _BYTE_PIECE.fullmatch(self.piece(token)) is not None

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of `token` in the middle of a text; they need not be whole characters."""
        data = self._bytes.get(token)
        if data is None:
            data = self._bytes[token] = self._bytes_of_piece(self.piece(token))
        return data

    def token_text(self, token: int) -> str:
        r"""Return `token_bytes` as text; bytes that are not a whole character are written as ``\xf0``."""
        return self.token_bytes(token).decode("utf-8", errors="backslashreplace")

    def piece(self, token: int) -> str:
        """Return `token` as the vocabulary writes it; empty if the vocabulary lacks it."""
        return self._backend.id_to_token(token) or ""

    def _bytes_of_piece(self, piece: str) -> bytes:
        if self.byte_level:
            known = [self._character_bytes.get(character) for character in piece]
            return piece.encode() if None in known else bytes(byte for byte in known if byte is not None)
        match = _BYTE_PIECE.fullmatch(piece) if self._falls_back_to_bytes else None
        if match:
            return bytes([int(match[1], 16)])
        return piece.replace(self._space, " ").encode() if self._space else piece.encode()

    @cached_property
    def _falls_back_to_bytes(self) -> bool:
        return any(part["type"] == "ByteFallback" for part in self._decoder_parts)

    @cached_property
    def _space(self) -> str | None:
        """The character that represents a space in this vocabulary, if there is one."""
        for part in self._decoder_parts:
            if part["type"] == "Metaspace":
                return str(part["replacement"])
            if part["type"] == "Replace" and part["content"] == " ":
                pattern: str | None = part["pattern"].get("String")
                return pattern
        return None


def _decoder_parts(decoder: Any) -> list[dict[str, Any]]:
    """Return the parts of a decoder from its JSON description, with sequences flattened."""
    if decoder is None:
        return []
    description = json.loads(decoder.__getstate__())
    parts = description["decoders"] if description["type"] == "Sequence" else [description]
    return list(parts)


def _rebuild_as_llama(backend: tokenizers.Tokenizer, folder: TokenizerFolder) -> None:
    """Make `backend` handle spaces as transformers' LlamaTokenizer does.

    LlamaTokenizer uses only the vocabulary and the merges of the file.
    """
    scheme = "never" if not folder.add_prefix_space else "always" if folder.legacy else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    backend.model.fuse_unk = True
    backend.model.byte_fallback = True
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(content=" ", left=1)] if folder.add_prefix_space else []
    backend.decoder = decoders.Sequence([*parts, *strip])


_CONVERTED = ("*.model", "*.tiktoken", "vocab.*", "merges.txt")
"""Files of older tokenizer formats. A conversion needs one of them."""


def _converted_backend(folder: TokenizerFolder) -> tokenizers.Tokenizer:
    """Convert an older tokenizer format with transformers. Raises CheckpointError if that fails."""
    if not any(any(folder.path.glob(pattern)) for pattern in _CONVERTED):
        raise CheckpointError(
            f"{folder.path} has no tokenizer: put the model's tokenizer.json and tokenizer_config.json there"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CheckpointError(
            f"{folder.path} has no tokenizer.json; install streamserve[odd-tokenizers] to convert other "
            "formats"
        ) from error
    try:
        backend = AutoTokenizer.from_pretrained(folder.path, local_files_only=True).backend_tokenizer
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{folder.path} has no tokenizer.json, and its tokenizer cannot be converted: {reason}"
        ) from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise CheckpointError(f"{folder.path} has no tokenizer.json, and its tokenizer cannot be converted")
    return backend
