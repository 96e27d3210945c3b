"""Synthetic chats for the embedded pair: one module a family, each a pure function of a ``random.Random``."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import arithmetic, articles, formats, functions, instructions, recall, records, tools
from .base import Check, Conversation, Message, Split

__all__ = ["FAMILIES", "SYSTEM_PROMPTS", "Check", "Conversation", "Message", "Split", "sample"]

FAMILIES: dict[str, Callable[[random.Random, Split], Conversation]] = {
    "instructions": instructions.generate,
    "arithmetic": arithmetic.generate,
    "functions": functions.generate,
    "articles": articles.generate,
    "recall": recall.generate,
    "formats": formats.generate,
    "json": records.generate,
    "tools": tools.generate,
}
# Shares of chats; articles and tool chats are long, so that their share of the tokens is larger.
WEIGHTS = {
    "instructions": 0.16,
    "arithmetic": 0.15,
    "functions": 0.1,
    "articles": 0.09,
    "recall": 0.08,
    "formats": 0.14,
    "json": 0.12,
    "tools": 0.16,
}
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are the small model that ships with streamserve.",
    "Answer briefly.",
    "You are a friendly assistant. Be short and clear.",
    "You help people with small tasks.",
]


def sample(rng: random.Random, split: Split = "train", family: str | None = None) -> Conversation:
    """One chat of the given family, or of a family drawn by its weight."""
    name = family or rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    chat = FAMILIES[name](rng, split)
    if family is None and rng.random() < 0.12:
        # A second chat after the first, of the same family or another: topics change in long chats.
        more = FAMILIES[rng.choice((name, *WEIGHTS))](rng, split)
        if more.messages[0]["role"] != "system" and chat.messages[0]["role"] != "system":
            chat.messages += more.messages
            chat.checks += more.checks
    if rng.random() < 0.15:
        _instruct(chat, rng.choice(SYSTEM_PROMPTS))
    return chat


def _instruct(chat: Conversation, prompt: str) -> None:
    """Put a system prompt first; a list of tools comes after it, as the chat template writes it."""
    first = chat.messages[0]
    if first["role"] == "system":
        first["content"] = f"{prompt}\n\n{first['content']}"
    else:
        chat.messages.insert(0, {"role": "system", "content": prompt})
