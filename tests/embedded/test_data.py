"""The generators: deterministic, split by construction, and right by their own checks."""

from __future__ import annotations

import json
import random
import re

import pytest
from embedded_data import (
    FAMILIES,
    arithmetic,
    articles,
    base,
    functions,
    judging_tasks,
    list_tasks,
    recall,
    sample,
    sentence_tasks,
    small_talk,
    story,
    words,
)
from embedded_data.checks import code_of, score
from embedded_data.function_kinds import KINDS

MODULES = [
    arithmetic,
    articles,
    functions,
    judging_tasks,
    list_tasks,
    recall,
    sentence_tasks,
    small_talk,
    story,
    words,
]
SPLITS: tuple[base.Split, ...] = ("train", "heldout")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", SPLITS)
def test_same_seed_same_chats(family: str, split: base.Split) -> None:
    first, second = ([sample(random.Random(seed), split, family) for seed in range(40)] for _ in range(2))
    assert [chat.messages for chat in first] == [chat.messages for chat in second]
    assert len({json.dumps(chat.messages) for chat in first}) > 35


@pytest.mark.parametrize("family", FAMILIES)
def test_chats_alternate_and_are_filled(family: str) -> None:
    for seed in range(150):
        chat = sample(random.Random(seed), "train", family)
        roles = [m["role"] for m in chat.messages if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert len(chat.replies()) == len(chat.checks) == len(roles) // 2
        for message in chat.messages:
            assert message["content"].strip() == message["content"] != ""
            # Braces stand in code, JSON and tests alone: elsewhere they would be an unfilled slot.
            assert "```" in message["content"] or not re.search(r"\{[a-zA-Z_0-9]+\}", message["content"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", SPLITS)
def test_own_replies_pass_their_checks(family: str, split: base.Split) -> None:
    count = 12 if family == "functions" else 150  # code runs in a process of its own
    for seed in range(count):
        for _, reply, check in sample(random.Random(seed), split, family).replies():
            assert score(check, reply) == 1.0, (check, reply)


def test_reference_code_runs() -> None:
    for kind in KINDS:
        made = kind.fill(random.Random(3), "heldout")
        assert len(kind.filled_tests(made)) >= 3
        assert "{" not in made["d"]


@pytest.mark.parametrize("module", MODULES)
def test_lists_split_without_overlap(module: object) -> None:
    lists = [
        value
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, list) and len(value) > 3
    ]
    assert lists
    for items in lists:
        train, held = (base.part(items, split) for split in SPLITS)
        assert held
        assert len(train) + len(held) == len(items)
        assert not {repr(item) for item in train} & {repr(item) for item in held}


def test_short_lists_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="too short"):
        base.part(["a", "b", "c"], "train")


def test_names_never_cross_the_split() -> None:
    rng = random.Random(0)
    drawn = {split: {words.full_name(rng, split) for _ in range(3000)} for split in SPLITS}
    assert not drawn["train"] & drawn["heldout"]


def test_checks_refuse_wrong_replies() -> None:
    assert score(base.Check("answer", 42), "17 + 25 = 42.\nanswer: 41") == 0.0
    assert score(base.Check("answer", 42), "answer: 42, I think") == 0.0
    assert score(base.Check("number", 42), "17 + 25 = 42.") == 1.0
    assert score(base.Check("facts", ["Mia", "7"]), "Mia has 17.") == 0.5
    assert score(base.Check("json", {"a": "1"}), "{a: 1}") == 0.0
    assert score(base.Check("lines", (2, ["cat", "dog", "cow"])), "- cat\n- cat") == 0.0
    assert score(base.Check("lines", (2, ["cat", "dog", "cow"])), "1. cat\n2. cow") == 1.0
    assert score(base.Check("python", [("f(1)", "2")]), "```python\ndef f(x):\n    return x\n```") == 0.0
    assert score(base.Check("python", [("f(1)", "2")]), "no code") == 0.0
    assert code_of("```python\nx = 1\n```") == "x = 1\n"
