"""The tokenizer for Python scripts of users: its methods have the names and arguments of Hugging Face
transformers' tokenizers."""

from collections.abc import Mapping, Sequence
from typing import Any

from streamserve.llm.chats import Conversation, Tools, render_chat
from streamserve.text.chat import Renderer
from streamserve.text.tokenizer import Tokenizer


class ScriptTokenizer:
    """A tokenizer with the methods that scripts call on transformers' tokenizers."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer | None) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens)

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Return the token ids of a text or of each text, as `input_ids`."""
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens)}
        return {"input_ids": [self.encode(each, add_special_tokens) for each in text]}

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each list of token ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary writes them."""
        return [self._tokenizer.piece(token) for token in ids]

    def apply_chat_template(
        self,
        conversation: Conversation,
        tools: Tools | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """Return the prompt of a conversation, as token ids or, without `tokenize`, as text. `variables` are
        further inputs of the template.

        Text that is encoded again recognizes special tokens in messages, which the token ids do not. Raises
        RequestError if the template refuses the conversation.
        """
        prompt = render_chat(
            self._tokenizer,
            self._renderer,
            conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=variables,
        )
        ids = list(prompt["prompt_token_ids"])
        return ids if tokenize else prompt.get("prompt", self.decode(ids))

    @property
    def chat_template(self) -> str | None:
        """The source of the model's chat template."""
        return self._tokenizer.chat_template

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        """The texts of special tokens by their names, such as eos_token."""
        return self._tokenizer.special_tokens

    @property
    def bos_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def __len__(self) -> int:
        return self._tokenizer.vocab_size
