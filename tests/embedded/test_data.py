"""The data generators are deterministic, split by construction, and correct by their own checks."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest
from embedded_data import (
    FAMILIES,
    arithmetic,
    articles,
    base,
    formats,
    functions,
    judging_tasks,
    list_tasks,
    recall,
    records,
    sample,
    sentence_tasks,
    small_talk,
    story,
    tool_catalogue,
    tools,
    words,
)
from embedded_data.checks import code_of, score
from embedded_data.composed import COMPOSED
from embedded_data.function_kinds import KINDS, Kind
from embedded_training.tokenizer import CHAT_TEMPLATE, render

from streamserve.text.chat import ChatTemplate

MODULES = [
    arithmetic,
    articles,
    formats,
    functions,
    judging_tasks,
    list_tasks,
    recall,
    records,
    sentence_tasks,
    small_talk,
    story,
    tool_catalogue,
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
        roles = " ".join(m["role"] for m in chat.messages)
        assert re.fullmatch(r"(system )?user assistant( (tool )*tool assistant| user assistant)*", roles)
        assert len(chat.replies()) == len(chat.checks) == roles.count("assistant")
        for message in chat.messages:
            assert message["content"].strip() == message["content"] != ""
            # Braces occur only in code, JSON and tests; elsewhere they would be an unfilled slot.
            assert "```" in message["content"] or not re.search(r"\{[a-zA-Z_0-9]+\}", message["content"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", SPLITS)
def test_own_replies_pass_their_checks(family: str, split: base.Split) -> None:
    count = 12 if family == "functions" else 150  # Code runs in a separate process.
    for seed in range(count):
        for _, reply, check in sample(random.Random(seed), split, family).replies():
            assert score(check, reply) == 1.0, (check, reply)


@pytest.mark.parametrize("kind", [*KINDS, *COMPOSED[::5]], ids=lambda kind: kind.name)
@pytest.mark.parametrize("split", SPLITS)
def test_reference_code_runs(kind: Kind, split: base.Split) -> None:
    made = kind.fill(random.Random(3), split)
    assert len(kind.filled_tests(made)) >= 3
    assert not set("{@[|]") & set(made["d"])
    assert "{" not in made["f"]


def test_combined_functions_need_known_blocks() -> None:
    train, held = ({kind.name for kind in base.part(functions.COMBINED, split)} for split in SPLITS)
    assert not train & held
    assert len(held) > 50
    known = {block for name in train for block in name.split("_")}
    assert {block for name in held for block in name.split("_")} <= known


@pytest.mark.parametrize("module", MODULES)
def test_lists_split_without_overlap(module: object) -> None:
    found = [
        value for value in vars(module).values() if isinstance(value, base.Choices) and len(value) > 3
    ] + list(module._TEXT.values() if module is arithmetic else ())
    assert found
    for items in found:
        train, held = (base.part(items, split) for split in SPLITS)
        assert held
        assert train
        assert {repr(item) for item in train} | {repr(item) for item in held} == {repr(i) for i in items}
        assert not {repr(item) for item in train} & {repr(item) for item in held}


@pytest.mark.parametrize(
    "wordings",
    [
        *(
            getattr(module, name)
            for module in MODULES
            for name in vars(module)
            if "ASK" in name and isinstance(getattr(module, name), base.Choices)
        ),
        *(wordings for wordings, _ in list_tasks.LIST_EDITS.values()),
        *(wordings for wordings, _ in list_tasks.FORMATS.values()),
        *(tool.asks for tool in tool_catalogue.TOOLS),
        *(wordings for wordings, _ in sentence_tasks.CASES),
        *(wordings for wordings, _, _ in sentence_tasks.REWRITES),
        *(plot.leads for plot in articles.PLOTS),
    ],
    ids=lambda wordings: wordings[0],
)
def test_requests_have_many_wordings(wordings: base.Choices[str]) -> None:
    assert len(base.part(wordings, "train")) >= 9
    assert len(wordings) >= 12


Drawn = dict[base.Split, set[tuple[int, str]]]


@pytest.fixture(scope="module")
def drawn() -> tuple[Drawn, dict[base.Split, set[str]], dict[base.Split, str]]:
    """Thousands of chats: what they drew from each list, the words that they invented, and their text."""
    values: Drawn = {split: set() for split in SPLITS}
    invented: dict[base.Split, set[str]] = {split: set() for split in SPLITS}
    draw, invent = base.Choices.draw, words.invent

    def recorded(self: base.Choices[object], rng: random.Random, split: base.Split) -> object:
        value = draw(self, rng, split)
        values[split].add((id(self), repr(value)))
        return value

    def noted(rng: random.Random, split: base.Split, *rest: list[str] | None) -> str:
        word = invent(rng, split, *rest)
        invented[split].add(word)
        return word

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base.Choices, "draw", recorded)
        patch.setattr(words, "invent", noted)
        text = {}
        for split in SPLITS:
            rng = random.Random(8)
            chats = [sample(rng, split) for _ in range(6000)]
            text[split] = " ".join(m["content"] for chat in chats for m in chat.messages)
    return values, invented, text


def test_no_held_out_filler_or_template_in_training(
    drawn: tuple[Drawn, dict[base.Split, set[str]], dict[base.Split, str]],
) -> None:
    values, invented, text = drawn
    assert all(len(values[split]) > 3000 and len(invented[split]) > 2000 for split in SPLITS)
    assert not values["train"] & values["heldout"]
    assert not invented["train"] & invented["heldout"]
    training = set(re.findall(r"[a-z]+", text["train"].lower()))
    # Only a short invented word may happen to be an ordinary word, or the plural of another one.
    assert not {word for word in invented["heldout"] if len(word) > 7 and word[-1] != "s"} & training


def test_held_out_words_are_held_out_in_every_list() -> None:
    lists = [value for value in vars(words).values() if isinstance(value, base.Choices)]
    lists = [items for items in lists if isinstance(items[0], str) and len(items) > 45]
    train, held = ({word.lower() for items in lists for word in base.part(items, split)} for split in SPLITS)
    assert not train & held
    assert len(train) > 1000
    assert len(held) > 200


def test_short_lists_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="too short"):
        base.part(["a", "b", "c"], "train")


def test_names_never_cross_the_split() -> None:
    rng = random.Random(0)
    drawn = {split: {words.full_name(rng, split) for _ in range(3000)} for split in SPLITS}
    assert not drawn["train"] & drawn["heldout"]


def test_templates_expand() -> None:
    assert base.expand("a [b|c|] d") == ["a b d", "a c d", "a d"]
    assert "Please go" in base.expand("@do go")
    assert base.held_out("What is it?") == base.held_out("what is it")


def test_any_name_passes_where_none_was_asked_for() -> None:
    assert score(base.Check("python", [("_(1)", "2")]), "```python\ndef g(x):\n    return x + 1\n```") == 1.0
    assert score(base.Check("python", [("_(1)", "2")]), "```python\nx = 1\n```") == 0.0


def test_long_chats_and_articles_occur() -> None:
    rng = random.Random(2)
    chats = [sample(rng) for _ in range(3000)]
    assert sum(len(chat.checks) >= 5 for chat in chats) > 150
    assert max(len(chat.messages[0]["content"]) for chat in chats) > 4000
    assert {chat.family for chat in chats if len(chat.checks) >= 4} == set(FAMILIES)


def test_calls_are_of_listed_functions_with_the_values_of_the_request() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(400):
        chat = sample(random.Random(seed), "heldout", "tools")
        listed = chat.messages[0]["content"]
        for before, _, check in chat.replies():
            kinds[check.kind] += 1
            if check.kind == "calls":
                kinds["two"] += len(check.want) == 2
                for name, arguments in check.want:
                    assert f"- {name}(" in listed
                    assert all(str(value) in before[-1]["content"] for value in arguments.values())
            if check.kind == "no_call":
                kinds["declined"] += tools.NO_TOOL in chat.messages[len(before)]["content"]
    assert min(kinds[kind] for kind in ("calls", "two", "facts", "no_call", "declined")) > 40


def test_the_chat_template_writes_tools_and_calls_as_the_training_text_has_them() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {"bos_token": "<|bos|>"})
    functions = [
        {
            "name": "book",
            "description": "Book a bed",
            "parameters": {
                "type": "object",
                "properties": {
                    "town": {"type": "string"},
                    "nights": {"type": "integer"},
                    "kind": {"type": "string", "enum": ["single", "double"]},
                    "extras": {"type": "array", "items": {"type": "string"}},
                    "when": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "required": ["town", "kind"],
            },
        },
        {"name": "now"},
    ]
    calls = [("book", {"town": "Bräx", "nights": 2}), ("now", {})]
    history = [
        {"role": "user", "content": "Book it."},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": name, "arguments": given}}
            for name, given in calls]},
        {"role": "tool", "tool_call_id": "1", "content": '{"ok": 1}'},
        {"role": "tool", "tool_call_id": "2", "content": "12:00"},
    ]  # fmt: skip
    written = [
        {"role": "user", "content": "Book it."},
        {"role": "assistant", "content": tools.call_text(calls)},
        {"role": "tool", "content": '{"ok": 1}'},
        {"role": "tool", "content": "12:00"},
    ]
    offered = [{"type": "function", "function": function} for function in functions]
    listed = tools.listed(functions)
    system = {"role": "system", "content": "Be short."}
    assert template.render(history, tools=offered) == render(
        [{"role": "system", "content": listed}, *written], prompt=True
    )
    assert template.render([system, *history], tools=offered) == render(
        [{"role": "system", "content": f"Be short.\n\n{listed}"}, *written], prompt=True
    )
    assert template.render([system, *history[:1]]) == render([system, *written[:1]], prompt=True)
    shown = "town: string, nights?: integer, kind: single|double, extras?: string[], when?: any"
    assert f"- book({shown}): Book a bed\n- now()" in listed


def test_checks_refuse_wrong_replies() -> None:
    call = base.Check("calls", [("f", {"x": 1})])
    assert score(call, tools.call_text([("f", {"x": 1})])) == 1.0
    assert score(call, tools.call_text([("f", {"x": 1})] * 2)) == 0.0
    assert score(call, tools.call_text([("f", {"x": "1"})])) == 0.0
    assert score(call, "I call it. " + tools.call_text([("f", {"x": 1})])) == 0.0
    assert score(call, "<tool_call>{</tool_call>") == 0.0
    assert score(base.Check("no_call"), tools.call_text([("f", {})])) == 0.0
    assert score(base.Check("keys", {"a": "int"}), '{"a": 3}') == 1.0
    assert score(base.Check("keys", {"a": "int"}), '{"a": true}') == 0.0
    assert score(base.Check("keys", {"a": "int"}), "[1]") == 0.0
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
