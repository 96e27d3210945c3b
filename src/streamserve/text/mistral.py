"""Mistral's own tokenizers, tekken.json and tokenizer.model.vN, through the library mistral-common.

The library encodes text, and renders conversations to token ids: so the text of a message can never become a
special token. Tokens are converted to text like tokens of other tokenizers of this kind.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders

from streamserve.protocol.errors import CheckpointError, RequestError
from streamserve.text.byte_level import byte_of_character
from streamserve.text.chat import Message, plain_message

_FILES = re.compile(r"tekken.*\.json|tokenizer(\.mm)?\.model\.v\d+(m\d+)?")
_REMEDY = 'pip install "streamserve[mistral]"'


def mistral_file(folder: Path) -> Path | None:
    """Return the file of a Mistral tokenizer in `folder`: tekken if there is one, else the file with the
    latest version. None if there is none."""
    found = [path for path in folder.iterdir() if _FILES.fullmatch(path.name) and path.is_file()]
    return max(found, key=lambda path: (path.suffix == ".json", path.name), default=None)


@dataclass(frozen=True)
class Encoding:
    """The token ids of a text."""

    ids: list[int]


class MistralBackend:
    """A tokenizer of mistral-common with the interface of the library `tokenizers`.

    Raises CheckpointError if the file cannot be read or the library is missing.
    """

    def __init__(self, file: Path) -> None:
        self.library = _load(file)
        self._tokenizer = self.library.instruct_tokenizer.tokenizer
        self._tekken = file.suffix == ".json"
        size = self._tokenizer.n_words
        self._special = {token for token in range(size) if self._tokenizer.is_special(token)}
        self._pieces = [self._piece(token) for token in range(size)]
        self._ids = {piece: token for token, piece in reversed(list(enumerate(self._pieces)))}
        self._ids |= {self._pieces[token]: token for token in self._special}
        self.decoder: Any = decoders.ByteLevel() if self._tekken else _sentencepiece_decoder()

    @property
    def special_tokens(self) -> dict[str, str]:
        """The named special tokens."""
        ids = {"bos_token": self._tokenizer.bos_id, "eos_token": self._tokenizer.eos_id}
        return {name: self._pieces[token] for name, token in ids.items()}

    @property
    def signs(self) -> str:
        """Text from which the formats of tool calls and reasoning are detected, in place of a chat template:
        all special tokens."""
        return " ".join(["tools", *(self._pieces[token] for token in sorted(self._special))])

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Return the ids of `text`. Special tokens in it are not recognized."""
        return Encoding(self._tokenizer.encode(text, bos=add_special_tokens, eos=False))

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = True) -> list[Encoding]:
        """Return `encode` of each text."""
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Ids outside of the vocabulary have no text."""
        known = [token for token in ids if 0 <= token < len(self._pieces)]
        shown = [token for token in known if not (skip_special_tokens and token in self._special)]
        text: str = self.decoder.decode([self._pieces[token] for token in shown])
        return text

    def id_to_token(self, token: int) -> str | None:
        return self._pieces[token] if 0 <= token < len(self._pieces) else None

    def token_to_id(self, piece: str) -> int | None:
        return self._ids.get(piece)

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return len(self._pieces)

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return self._ids

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Return the special tokens by id."""
        return {token: AddedToken(self._pieces[token], special=True) for token in self._special}

    def add_special_tokens(self, tokens: list[AddedToken]) -> int:
        """Raise CheckpointError: the vocabulary is fixed, and contains all special tokens that it names."""
        raise CheckpointError(f"the tokenizer lacks {', '.join(map(str, tokens))}")

    def no_truncation(self) -> None:
        """Do nothing: this tokenizer never truncates."""

    def no_padding(self) -> None:
        """Do nothing: this tokenizer never pads."""

    def to_str(self) -> str:
        """Return a description without a vocabulary. It tells that a text must be tokenized as a whole."""
        parts = {"model": {"type": "mistral-common"}, "normalizer": None, "pre_tokenizer": None}
        return json.dumps({**parts, "added_tokens": []})

    @cached_property
    def _characters(self) -> dict[int, str]:
        return {byte: character for character, byte in byte_of_character().items()}

    def _piece(self, token: int) -> str:
        """Return a token in the form that the decoder reads."""
        if not self._tekken or token in self._special:
            piece: str = self._tokenizer.id_to_piece(token)
            return piece
        data: bytes = self._tokenizer.id_to_byte_piece(token)
        return "".join(self._characters[byte] for byte in data)


class MistralTemplate:
    """Renders conversations with mistral-common. `variables` are the names of the inputs that it reads."""

    def __init__(self, backend: MistralBackend) -> None:
        self._library = backend.library
        version = self._library.instruct_tokenizer.tokenizer.version
        efforts = getattr(version, "supports_model_settings", False)
        self.variables = frozenset({"reasoning_effort"} if efforts else ())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of `messages` and `tools`. Takes the same arguments as ChatTemplate.render.

        Raises RequestError for messages that the library refuses.
        """
        if not messages:
            raise RequestError("messages must hold at least one message", field="messages")
        if add_generation_prompt == continue_final_message:
            raise RequestError(
                "this model's tokenizer needs either add_generation_prompt or continue_final_message",
                field="add_generation_prompt",
            )
        for name in variables or {}:
            if name not in self.variables:
                raise RequestError(
                    f"chat_template_kwargs: {name} is not known to this model's tokenizer",
                    field="chat_template_kwargs",
                )
        chat = [_openai_message(plain_message(message, index)) for index, message in enumerate(messages)]
        try:
            return self._encode(
                chat,
                [dict(tool) for tool in tools] if tools else None,
                continue_final_message,
                variables or {},
            )
        except RecursionError as error:
            raise RequestError("messages are nested too deeply", field="messages") from error
        # The library raises its own errors, pydantic's errors, and bare assertions.
        except Exception as error:
            reason = " ".join(str(error).split())[:500] or type(error).__name__
            raise RequestError(
                f"mistral-common refuses this conversation: {reason}", field="messages"
            ) from error

    def _encode(
        self,
        chat: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        proceed: bool,
        variables: Mapping[str, Any],
    ) -> list[int]:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        request: Any = ChatCompletionRequest.from_openai(
            messages=chat, tools=tools, continue_final_message=proceed, **variables
        )
        ids: list[int] = self._library.encode_chat_completion(request).tokens
        return ids


def _openai_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the format of OpenAI's clients: the arguments of calls are JSON text."""
    role = "system" if message["role"] == "developer" else message["role"]
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "role": role, **({"tool_calls": calls} if calls else {})}


def _load(file: Path) -> Any:
    """Return the library's tokenizer. Raises CheckpointError if it cannot be loaded."""
    try:
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

        return MistralTokenizer.from_file(file)
    except ImportError as error:
        raise CheckpointError(f"{file} needs the library mistral-common: {_REMEDY}") from error
    except Exception as error:  # KeyErrors and assertions about the file's content
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {reason}") from error


def _sentencepiece_decoder() -> Any:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
