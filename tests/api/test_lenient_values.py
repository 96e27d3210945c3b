"""Unusual values of real clients and models are accepted where their meaning is clear."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.protocol.errors import RequestError
from streamserve.protocol.grammar import Grammar
from streamserve.text.grammar import GrammarCheck, compiler
from streamserve.text.surrogates import well_formed
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import ScriptedGenerator, Served, scripted
from tests.api.tool_calls import TEMPLATE, WEATHER, says
from tests.text.folders import byte_level_folder

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


class CheckingGenerator(ScriptedGenerator):
    """A scripted generator that compiles grammars as the real generator does."""

    async def check_grammar(self, grammar: Grammar, field: str) -> None:
        await GrammarCheck(compiler(self.tokenizer, 320, (3,)), 1 << 16, 600.0)(grammar, field)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> ScriptedGenerator:
    folder = byte_level_folder(tmp_path_factory.mktemp("talker"), chat_template=TEMPLATE)
    generator = CheckingGenerator(Tokenizer.from_folder(folder), script=says("hello"))
    return generator.replaced(model=msgspec.structs.replace(generator.model, max_model_len=4096))


def prompt_of(generator: ScriptedGenerator) -> str:
    return generator.tokenizer.decode(generator.submitted[-1].prompt, skip_special_tokens=False)


def test_whole_numbers_may_be_floats(hello: Served, generator: ScriptedGenerator) -> None:
    fields = {"max_tokens": 5.0, "n": 2.0, "seed": 7.0, "top_k": 3.0}
    response = hello.post(COMPLETIONS, prompt="hi", **fields)
    assert response.status_code == 200, response.text
    params = generator.submitted[-1].params
    assert (params.max_tokens, params.n, params.seed, params.top_k) == (5, 2, 7, 3)
    for value in (5.5, -1e30):
        response = hello.post(COMPLETIONS, prompt="hi", max_tokens=value)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


def test_a_result_without_an_id_answers_the_next_call(talker: ScriptedGenerator, tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}"
        "{{ message.role }} {{ message.tool_call_id }} {{ message.content }};{% endfor %}"
    )
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path, chat_template=template))
    function = {"name": "get_weather", "arguments": "{}"}
    calls = [{"id": name, "type": "function", "function": function} for name in "ab"]
    result = {"role": "tool", "content": "sun"}
    asked = {"role": "assistant", "tool_calls": calls}
    for results, expected in (
        ([result, result], "tool a sun;tool b sun;"),
        ([{**result, "tool_call_id": "b"}, result], "tool b sun;tool a sun;"),
        ([{**result, "tool_call_id": ""}, {**result, "tool_call_id": "b"}], "tool a sun;tool b sun;"),
        ([result] * 3, "tool a sun;tool b sun;tool  sun;"),
    ):
        generator = talker.replaced(tokenizer=tokenizer)
        with scripted(generator) as server:
            response = server.post(CHATS, messages=[*MESSAGES, asked, *results])
            assert response.status_code == 200, response.text
        assert prompt_of(generator) == f"user  hi;assistant  ;{expected}"


@pytest.mark.parametrize("absent", [None, [], False, "", 0, {}])
def test_empty_tool_calls_count_as_absent(talker: ScriptedGenerator, absent: Any) -> None:
    replied = {"role": "assistant", "content": "x", "tool_calls": absent}
    result = {"role": "tool", "content": "y", "tool_call_id": "a"}
    with scripted(talker) as server:
        response = server.post(CHATS, messages=[*MESSAGES, replied, result])
    assert response.status_code == 200, response.text
    assert "<tool_call>" not in prompt_of(talker)


@pytest.mark.parametrize(
    ("written", "rendered"),
    [
        (r'{"a": "\ud800"}', '{"a": "�"}'),
        (r'{"a": "x\uDC00y"}', '{"a": "x�y"}'),
        (r'{"\udfff": 1}', '{"�": 1}'),
        (r'{"a": "\ud83e\udd8a"}', '{"a": "🦊"}'),
    ],
)
def test_lone_surrogates_of_arguments_are_replaced(
    talker: ScriptedGenerator, written: str, rendered: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": written}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    with scripted(talker) as server:
        response = server.post(CHATS, messages=messages)
    assert response.status_code == 200, response.text
    text = prompt_of(talker).split("<tool_call>")[1].split("</tool_call>")[0]
    assert json.loads(text)["arguments"] == json.loads(rendered)


@settings(max_examples=50)
@given(st.text(st.characters()))
def test_well_formed_text_can_be_encoded_and_characters_stay(text: str) -> None:
    formed = well_formed(text)
    assert formed.encode().decode() == formed
    if all(not "\ud800" <= sign <= "\udfff" for sign in text):
        assert formed == text


@pytest.mark.parametrize("fields", [{"prompt": "hi"}, {"messages": MESSAGES}])
def test_bad_words_become_a_grammar(talker: ScriptedGenerator, fields: Any) -> None:
    route = COMPLETIONS if "prompt" in fields else CHATS
    with scripted(talker) as server:
        response = server.post(route, **fields, bad_words=["cat", 'a "dog"\n', "ä/ö"])
        assert response.status_code == 200, response.text
        grammar = talker.submitted[-1].params.grammar
        assert grammar is not None
        assert server.post(route, **fields, bad_words=[]).status_code == 200
        assert talker.submitted[-1].params.grammar is None
        for wrong in ({"bad_words": [""]}, {"bad_words": ["a"], "guided_regex": "b"}):
            error = server.post(route, **fields, **wrong).json()["error"]
            assert error["param"] == "bad_words"
        if route == CHATS:
            response = server.post(route, **fields, bad_words=["a"], tools=[WEATHER])
            assert (response.status_code, response.json()["error"]["param"]) == (400, "bad_words")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text('ab"/\\', min_size=1, max_size=3), min_size=1, max_size=3),
    st.text('ab"/\\\n', max_size=8),
)
def test_the_grammar_of_bad_words_allows_every_other_text(words: list[str], text: str) -> None:
    from llguidance import LLMatcher, LLTokenizer

    from streamserve.protocol.grammar import to_llguidance
    from streamserve.text.structured import without_words

    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, to_llguidance(without_words(words)), log_level=0)
    ids = tokenizer.tokenize_str(text)
    taken = matcher.try_consume_tokens(ids)
    assert not matcher.is_error()
    allowed = not any(word in text for word in words)
    assert (taken == len(ids) and matcher.is_accepting()) == allowed


def test_the_function_whose_schema_cannot_be_compiled_is_named(talker: ScriptedGenerator) -> None:
    broken = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(("}}}
    tools = [WEATHER, {"type": "function", "function": {"name": "broken", "parameters": broken}}]
    with scripted(talker) as server:
        response = server.post(CHATS, messages=MESSAGES, tools=tools, tool_choice="required")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert error["message"].startswith("tools[1].function.parameters cannot be compiled: ")


def test_annotations_of_a_required_function_are_named(talker: ScriptedGenerator) -> None:
    tags = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}
    function = {"name": "tag", "parameters": {"type": "object", "properties": {"tags": tags}}}
    fields: Any = {"messages": MESSAGES, "tool_choice": "required"}
    with scripted(talker.replaced(script=says('[{"name": "tag", "parameters": {}}]'))) as server:
        tools = [{"type": "function", "function": function}]
        response = server.post(CHATS, tools=tools, **fields)
        assert response.status_code == 200, response.text
        warning = '299 streamserve "without effect: uniqueItems in a schema, as no grammar enforces it"'
        assert response.headers["warning"] == warning
        strict = [{"type": "function", "function": {**function, "strict": True}}]
        for choice in ("required", "auto"):
            response = server.post(CHATS, tools=strict, **{**fields, "tool_choice": choice})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "tools")
            where = "tools[0].function.parameters.properties.tags"
            assert error["message"].startswith(f"{where}: uniqueItems is not supported")


@pytest.mark.parametrize("strict", [True, False, None])
def test_annotations_of_a_response_format(talker: ScriptedGenerator, strict: bool | None) -> None:
    schema = {"type": "string", "format": "currency"}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}
    with scripted(talker) as server:
        response = server.post(CHATS, messages=MESSAGES, response_format=format)
    if strict:
        message = "response_format.json_schema.schema: format is not supported"
        assert response.json()["error"]["message"].startswith(message)
    else:
        assert "format in a schema" in response.headers["warning"]
        assert json.loads(talker.submitted[-1].params.grammar.text) == {"type": "string"}  # type: ignore[union-attr]


def test_request_errors_keep_their_code() -> None:
    from streamserve.api.openai.field_names import renamed

    error = RequestError("messages are long", field="messages", code="context_length_exceeded")
    assert renamed(error, {"messages": "input"}).code == "context_length_exceeded"
