"""Conversations of scripts, rendered to prompts."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from streamserve.llm.prompts import TokensPrompt
from streamserve.protocol.errors import RequestError
from streamserve.text.chat import Message, Renderer, given_template, require
from streamserve.text.prompt_text import PromptText
from streamserve.text.rendering import render_conversation
from streamserve.text.tokenizer import Tokenizer

Conversation = Sequence[Message]
Tools = Sequence[Mapping[str, Any]]
_log = logging.getLogger(__name__)


def render_chat(
    tokenizer: Tokenizer,
    renderer: Renderer | None,
    chat: Conversation,
    *,
    tools: Tools | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> TokensPrompt:
    """Return the prompt of a conversation: its token ids, and its text if the template writes text.

    `chat_template` is a template in place of the model's `renderer`. Special tokens are recognized in
    messages of the assistant only. Raises RequestError if the template refuses the conversation,
    CheckpointError if the model takes no other template, and logs a warning if a message is left out or
    moved.
    """
    if chat_template is not None:
        tokenizer.check_takes_template()
        renderer = given_template(chat_template, tuple(tokenizer.special_tokens.items()))
    conversation = render_conversation(
        require(renderer),
        chat,
        tokenizer.special_spans,
        tools=list(tools) if tools else None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=dict(chat_template_kwargs or {}),
    )
    for name, warning in conversation.warnings.items():
        _log.warning("without effect: %s%s", name, warning)
    prompt = conversation.prompt
    if isinstance(prompt, list):
        return TokensPrompt(prompt_token_ids=prompt)
    return TokensPrompt(prompt_token_ids=encode(tokenizer, prompt, False), prompt=prompt.text)


def encode(tokenizer: Tokenizer, text: str | PromptText, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text. Raises RequestError if it is not valid Unicode."""
    try:
        prompt = PromptText(text) if isinstance(text, str) else text
        return tokenizer.encode_prompt(prompt, add_special_tokens)
    except UnicodeEncodeError:
        raise RequestError(
            "the prompt has a lone surrogate, which UTF-8 cannot encode", field="prompt"
        ) from None
