"""Short instructions: lists, sentences, classes, extraction, formats, small talk and polite refusals."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import judging_tasks, list_tasks, sentence_tasks, small_talk
from .base import Conversation, Split

Task = Callable[[random.Random, Split, Conversation], None]

TASKS: list[tuple[Task, float]] = [
    (sentence_tasks.change_case, 1.5),
    (list_tasks.edit_list, 1.5),
    (list_tasks.format_list, 1.5),
    (list_tasks.name_things, 1.2),
    (judging_tasks.classify, 1),
    (sentence_tasks.extract, 1.5),
    (sentence_tasks.rewrite, 1),
    (judging_tasks.know, 0.8),
    (small_talk.chat, 2),
]


def generate(rng: random.Random, split: Split = "train") -> Conversation:
    """One or two short tasks in one chat."""
    conversation = Conversation("instructions")
    for _ in range(rng.choice((1, 1, 1, 2))):
        task = rng.choices([task for task, _ in TASKS], [weight for _, weight in TASKS])[0]
        task(rng, split, conversation)
    return conversation
