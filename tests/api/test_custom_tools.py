"""Custom tools in chats: their input is text that may have to follow a grammar."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from streamserve.api.openai.chat_parts import CustomCall, CustomCalls
from streamserve.api.openai.custom_tools import custom_arguments, custom_input
from streamserve.protocol.grammar import Grammar, to_llguidance
from streamserve.text.grammar import GrammarCheck, compiler
from streamserve.text.reply_events import CallArguments, CallBegin, CallEnd, ReplyEvent, TextDelta
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import ScriptedGenerator, Served, scripted
from tests.api.tool_calls import TEMPLATE, WEATHER, says
from tests.text import patch_grammar
from tests.text.folders import byte_level_folder

ROUTE = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
CODER = "<tool_call><function=f><parameter=p>\n"
HARMONY = "<|channel|><|message|>"


def custom(definition: str, syntax: str = "lark", name: str = "apply_patch") -> Any:
    grammar = {"syntax": syntax, "definition": definition}
    return {"type": "custom", "custom": {"name": name, "format": {"type": "grammar", "grammar": grammar}}}


PATCH = custom(patch_grammar.LARK)
NAMED: Any = {"type": "custom", "custom": {"name": "apply_patch"}}
FREE: Any = {"type": "custom", "custom": {"name": "run", "description": "Run Python."}}
CALL = f"<tool_call>\n{json.dumps({'name': 'run', 'arguments': {'input': 'print(1)'}})}\n</tool_call>"


class CheckingGenerator(ScriptedGenerator):
    """A scripted generator that compiles grammars as the real generator does."""

    async def check_grammar(self, grammar: Grammar, field: str) -> None:
        await GrammarCheck(compiler(self.tokenizer, 320, (3,)), 1 << 16, 600.0)(grammar, field)


@pytest.fixture
def agent(tmp_path: Path) -> ScriptedGenerator:
    return replying(tmp_path, CALL)


def replying(folder: Path, text: str, more: str = "") -> ScriptedGenerator:
    """Return a model that writes `text`. Its template shows the call format whose marks are `more`."""
    template = TEMPLATE + (f"{{# {more} #}}" if more else "")
    tokenizer = Tokenizer.from_folder(byte_level_folder(folder, chat_template=template))
    pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
    generator = CheckingGenerator(tokenizer, script=says(*pieces))
    return generator.replaced(model=msgspec.structs.replace(generator.model, max_model_len=8192))


def prompt_of(generator: ScriptedGenerator) -> str:
    return generator.tokenizer.decode(generator.submitted[-1].prompt, skip_special_tokens=False)


def allows(generator: ScriptedGenerator, text: str) -> bool:
    grammar = generator.submitted[-1].params.grammar
    assert grammar is not None
    matcher = LLMatcher(LLTokenizer("byte"), to_llguidance(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def written(choice: str, text: str) -> str:
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    return {
        "auto": f'Hm.<tool_call>{{"name": "apply_patch", "arguments": {arguments}}}</tool_call>',
        "required": f'[{{"name": "apply_patch", "parameters": {arguments}}}]',
    }.get(choice, arguments)


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_the_input_follows_the_grammar(agent: ScriptedGenerator, choice: str) -> None:
    with scripted(agent) as server:
        chosen = NAMED if choice == "named" else choice
        response = server.post(ROUTE, messages=MESSAGES, tools=[WEATHER, PATCH, FREE], tool_choice=chosen)
    assert response.status_code == 200, response.text
    assert "warning" not in response.headers
    assert all(allows(agent, written(choice, text)) for text in patch_grammar.GOOD)
    assert not any(allows(agent, written(choice, text)) for text in patch_grammar.BAD)
    if choice == "auto":
        assert allows(agent, CALL)
        assert "The input must match this grammar in Lark:" in prompt_of(agent)


def test_the_real_engine_generates_such_inputs(server: Served) -> None:
    for seed in range(3):
        reply: Any = server.client.chat.completions.create(
            model="tiny", messages=MESSAGES, seed=seed, temperature=1.0, max_tokens=400,
            tools=[custom(r'^on "\d{4}"\n|never$', "regex")], tool_choice=NAMED,
        )  # fmt: skip
        (call,) = reply.choices[0].message.tool_calls
        assert call.type == "custom"
        assert call.custom.name == "apply_patch"
        assert call.custom.input == "never" or (
            call.custom.input[:4] == 'on "' and int(call.custom.input[4:8]) >= 0
        )
        assert reply.choices[0].finish_reason == "tool_calls"


def test_a_grammar_in_tags_and_one_that_cannot_be_followed_there(tmp_path: Path) -> None:
    agent = replying(tmp_path, "Done.", CODER)
    value = (
        "<tool_call>\n<function=apply_patch>\n<parameter=input>\n%s\n</parameter>\n</function>\n</tool_call>"
    )
    lines = custom(r"start: /(.|\n)+x/", name="lines")
    with scripted(agent) as server:
        response = server.post(ROUTE, messages=MESSAGES, tools=[PATCH, lines])
        assert response.status_code == 200, response.text
        assert response.headers["warning"] == (
            '299 streamserve "without effect: tools[].format (the model sees the grammar, but its output is '
            'not constrained)"'
        )
        assert all(allows(agent, value % text) for text in patch_grammar.GOOD)
        assert not any(allows(agent, value % text) for text in patch_grammar.BAD)
        assert allows(agent, value.replace("apply_patch", "lines") % "anything")


def test_a_format_whose_calls_cannot_be_constrained_gets_a_warning(tmp_path: Path) -> None:
    agent = replying(tmp_path, "<|channel|>final<|message|>Done.", HARMONY)
    with scripted(agent) as server:
        response = server.post(ROUTE, messages=MESSAGES, tools=[PATCH])
    assert response.status_code == 200, response.text
    assert "tools[].format" in response.headers["warning"]
    assert agent.submitted[-1].params.grammar is None


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_gets_the_input_as_text(agent: ScriptedGenerator, stream: bool) -> None:
    with scripted(agent) as server:
        fields: Any = {"model": "scripted", "messages": MESSAGES, "tools": [FREE, WEATHER]}
        if stream:
            events = list(server.client.chat.completions.create(**fields, stream=True))
            calls = [call for event in events for call in event.choices[0].delta.tool_calls or []]
            assert events[-1].choices[0].finish_reason == "tool_calls"
            assert calls[0].index == 0
        else:
            choice = server.client.chat.completions.create(**fields).choices[0]
            calls = choice.message.tool_calls
            assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    (call,) = (each.model_dump(exclude_none=True) for each in calls)
    assert call["type"] == "custom"
    assert call["custom"] == {"name": "run", "input": "print(1)"}
    assert "function" not in call


def test_calls_go_back_to_the_model(agent: ScriptedGenerator) -> None:
    with scripted(agent) as server:
        message = server.post(ROUTE, messages=MESSAGES, tools=[FREE]).json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"}
        response = server.post(ROUTE, messages=[*MESSAGES, message, result], tools=[FREE])
    assert response.status_code == 200, response.text
    assert '<tool_call>{"name": "run", "arguments": {"input": "print(1)"}}</tool_call>' in prompt_of(agent)


def test_one_of_the_tools_can_be_allowed(agent: ScriptedGenerator) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "run"}}]}
    with scripted(agent) as server:
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        response = server.post(ROUTE, messages=MESSAGES, tools=[FREE, PATCH], tool_choice=choice)
    assert response.status_code == 200, response.text
    assert "apply_patch" not in prompt_of(agent)
    assert agent.submitted[-1].params.grammar is None


FORMAT = "tools[1].custom.format"


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"type": "custom"}, "tools[1] must have the type function, and a function; or the type custom"),
        ({"type": "custom", "custom": {"name": "a b"}}, "tools[1].custom.name must have 1 to 128"),
        (
            {"type": "custom", "custom": {"name": "run"}},
            "tools[1].custom.name: there are two tools called run",
        ),
        (
            {"type": "custom", "custom": {"name": "a", "description": 5}},
            "tools[1].custom.description must be",
        ),
        (
            {"type": "custom", "custom": {"name": "a", "format": {"type": "xml"}}},
            f"{FORMAT} must have a type",
        ),
        (
            {"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}},
            f"{FORMAT}.grammar must have a syntax, lark or regex, and a definition",
        ),
        (custom("start: a"), f"{FORMAT}.grammar cannot be compiled: "),
        (custom("(?=a)b", "regex"), f"{FORMAT}.grammar cannot be compiled: "),
        (custom("start: <|im_end|>"), f"{FORMAT}.grammar.definition must not refer to tokens"),
        (custom("start: @call"), f"{FORMAT}.grammar.definition must not refer to tokens"),
        (custom("start: " + '("a")' * 501), f"{FORMAT}.grammar has 502 rules and groups"),
        (custom("start: " + '"a" ' * 20_000), f"{FORMAT}.grammar is too large: at most 65536 bytes"),
    ],
)
def test_errors_name_the_tool(agent: ScriptedGenerator, tool: Any, message: str) -> None:
    for choice in ("auto", "required"):
        with scripted(agent) as server:
            response = server.post(ROUTE, messages=MESSAGES, tools=[FREE, tool], tool_choice=choice)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tools"), error
        assert error["message"].startswith(message)


def test_a_call_without_its_text_is_refused(hello: Served) -> None:
    call = {"id": "a", "type": "custom", "custom": {"name": "run"}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    error = hello.post(ROUTE, messages=messages).json()["error"]
    assert error["message"].startswith("messages[1].tool_calls[0].custom must have the tool's name")


@settings(max_examples=50)
@given(st.text())
def test_the_input_of_a_custom_tool_survives_the_round_trip(text: str) -> None:
    assert custom_input(custom_arguments(text)) == text


@pytest.mark.parametrize("arguments", ["", "{", "[]", "null", '"a"', '{"input": 5}', '{"output": "a"}'])
def test_arguments_that_are_not_as_declared_are_the_input(arguments: str) -> None:
    assert custom_input(arguments) == arguments


@given(st.randoms(use_true_random=False))
def test_calls_of_custom_tools_are_whole_however_events_are_split(rng: random.Random) -> None:
    events: list[ReplyEvent] = [TextDelta("a"), CallBegin(0, "x", "run")]
    events += [CallArguments(0, piece) for piece in ('{"input"', ': "1', '2"}')]
    events += [
        CallEnd(0),
        CallBegin(1, "y", "other"),
        CallArguments(1, "{}"),
        CallEnd(1),
        CallBegin(2, "z", "run"),
    ]
    events += [CallArguments(2, '{"inp')]
    calls, read = CustomCalls(frozenset({"run"})), []
    while events:
        count = rng.randint(1, len(events))
        part, events = events[:count], events[count:]
        read += calls.read(part, final=not events)
    assert [event for event in read if not isinstance(event, CallEnd)] == [
        TextDelta("a"),
        CustomCall(0, "x", "run", "12"),
        CallBegin(1, "y", "other"),
        CallArguments(1, "{}"),
        CustomCall(2, "z", "run", '{"inp'),
    ]
