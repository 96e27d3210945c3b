"""Tools work as OpenAI's client expects: the template renders them, the model calls them freely or by force,
and calls are streamed."""

import json
import re
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from streamserve.api.generator import Generator, Item
from streamserve.api.settings import ApiSettings
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.resolve import resolve
from streamserve.text.output import ChoiceDelta, Usage
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import ScriptedGenerator, Served, scripted, served
from tests.api.tool_calls import CALL, PARAMETERS, TEMPLATE, WEATHER, says
from tests.checkpoints import make_checkpoint
from tests.text.folders import byte_level_folder

TIME: Any = {"type": "function", "function": {"name": "get_time", "description": "Now."}}
MESSAGES: Any = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random model with a template for tools and thoughts."""
    folder = make_checkpoint(tmp_path_factory.mktemp("tools"), max_position_embeddings=4096)
    _set_template(folder, TEMPLATE.replace("{% if tools %}", "{#</think>#}{% if tools %}"))

    async def start() -> Generator:
        llm = AsyncLLM(resolve(str(folder), {"threads": 1, "num_blocks": 1024}))
        await llm.start()
        return llm

    with served(start, ApiSettings(reasoning_parser="none")) as running:
        yield running


def _set_template(folder: Path, template: str) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> ScriptedGenerator:
    folder = byte_level_folder(tmp_path_factory.mktemp("talker"), chat_template=TEMPLATE)
    generator = ScriptedGenerator(Tokenizer.from_folder(folder))
    return generator.replaced(model=msgspec.structs.replace(generator.model, max_model_len=4096))


def create(server: Served, **fields: Any) -> Any:
    fields = {
        "model": server.llm.served_names[0],
        "messages": MESSAGES,
        "max_tokens": 600,
        "seed": 1,
        **fields,
    }
    return server.client.chat.completions.create(**fields)


@pytest.mark.parametrize("seed", range(3))
def test_a_named_function_is_called(server: Served, seed: int) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    reply = create(server, tools=[TIME, WEATHER], tool_choice=choice, seed=seed, n=2)
    for one in reply.choices:
        (call,) = one.message.tool_calls
        assert (call.type, call.function.name) == ("function", "get_weather")
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
        assert one.message.content is None
        assert one.finish_reason == "tool_calls"


@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_is_made_where_one_is_required(server: Served, parallel: bool) -> None:
    counts = []
    for seed in range(16 if parallel else 4):  # The number of calls depends on llguidance.
        reply = create(
            server, tools=[TIME, WEATHER], tool_choice="required", parallel_tool_calls=parallel, seed=seed,
            max_tokens=3000,
        )  # fmt: skip
        calls = reply.choices[0].message.tool_calls
        counts.append(len(calls))
        for call in calls:
            arguments = json.loads(call.function.arguments)
            assert call.function.name in ("get_weather", "get_time")
            jsonschema.validate(
                arguments, PARAMETERS if call.function.name == "get_weather" else {"maxProperties": 0}
            )
        if counts[-1] > 1:
            break
    assert (max(counts) > 1) == parallel


def test_a_strict_function_is_held_to_its_schema_though_the_model_is_free(talker: ScriptedGenerator) -> None:
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with scripted(talker.replaced(script=says("Hello."))) as server:
        create(server, tools=[TIME, WEATHER])
        assert server.llm.submitted[-1].params.grammar is None
        create(server, tools=[TIME, strict])
        grammar = server.llm.submitted[-1].params.grammar
        schemas = json.loads(grammar.text)["schemas"]["call"]["$defs"]
        assert schemas["tool0"] == {"type": "object"}
        assert schemas["tool1"]["required"] == ["city", "days"]
        assert grammar.after == "</think>"


def test_a_random_model_follows_the_grammar_of_strict_functions(server: Served) -> None:
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    message = create(server, tools=[strict], max_tokens=40).choices[0].message
    free = create(server, tools=[WEATHER], max_tokens=40).choices[0].message
    assert "\ufffd" in free.content
    assert len(message.content) > 5
    assert "\ufffd" not in message.content.rstrip("\ufffd")  # The grammar's text is always valid Unicode.


def test_a_stream_of_a_call_makes_up_the_whole(server: Served) -> None:
    fields = {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False}
    whole = create(server, **fields).choices[0].message.tool_calls[0].function
    events = [event.choices[0] for event in create(server, **fields, stream=True)]
    deltas = [call for event in events for call in event.delta.tool_calls or []]
    assert deltas[0].function.name == whole.name
    assert deltas[0].id
    assert all(delta.index == 0 and delta.id is None for delta in deltas[1:])
    assert len(deltas) > 2
    assert "".join(delta.function.arguments for delta in deltas) == whole.arguments
    assert [event.finish_reason for event in events if event.finish_reason] == ["tool_calls"]
    assert not any(event.delta.content for event in events)


def test_the_template_shows_the_tools_to_the_model(server: Served) -> None:
    def size(**fields: Any) -> int:
        return create(server, max_tokens=1, **fields).usage.prompt_tokens  # type: ignore[no-any-return]

    without = size()
    assert size(tools=[TIME]) > without
    assert size(tools=[TIME, WEATHER]) > size(tools=[TIME])
    assert size(tools=[TIME], tool_choice="none") == without


def test_what_the_model_writes_is_parsed(talker: ScriptedGenerator) -> None:
    with scripted(talker.replaced(script=says("Let me see.\n", CALL[:30], CALL[30:]))) as server:
        reply = create(server, tools=[WEATHER])
        message = reply.choices[0].message
        assert message.content == "Let me see."
        assert message.tool_calls[0].function.arguments == '{"city": "Rome", "days": 2}'
        assert reply.choices[0].finish_reason == "tool_calls"
        deltas = [event.choices[0].delta for event in create(server, tools=[WEATHER], stream=True, n=2)]
        assert sum(len(delta.tool_calls or []) for delta in deltas) == 2  # one event for each choice
        for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": [TIME]}):
            message = create(server, **fields).choices[0].message
            assert (message.content, message.tool_calls) == ("Let me see.\n" + CALL, None)


def test_a_stop_string_acts_in_the_answer_only(talker: ScriptedGenerator) -> None:
    script = says("<think>So a b</think>", "Look a ", CALL, "a b", finish="length")
    with scripted(talker.replaced(script=script)) as server:
        choice = create(server, tools=[WEATHER], stop=["a b", "Rome"]).choices[0]
        events = list(create(server, tools=[WEATHER], stop=["a b", "Rome"], stream=True))
    assert (choice.message.reasoning, choice.message.content) == ("So a b", "Look a")
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Rome", "days": 2}'
    assert (choice.finish_reason, choice.stop_reason) == ("tool_calls", "a b")
    assert "".join(event.choices[0].delta.content or "" for event in events) == "Look a"
    assert events[-1].choices[0].finish_reason == "tool_calls"


def test_a_stop_token_within_a_call_leaves_no_call_to_run(talker: ScriptedGenerator) -> None:
    async def script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        yield ChoiceDelta(0, CALL[:60], (72,))
        yield ChoiceDelta(0, tokens=(9,), finish="stop", stop=9)
        yield Usage(len(prompt), 2)

    with scripted(talker.replaced(script=script)) as server:
        choice = create(server, tools=[WEATHER]).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", 9)


def test_one_event_of_a_stream_has_its_parts_in_their_order(talker: ScriptedGenerator) -> None:
    """Text after a tool call is sent in a separate event, because clients read an event's text before its
    calls."""
    with scripted(talker.replaced(script=says(CALL[:-15], CALL[-15:] + "Done."))) as server:
        events = [event.choices[0] for event in create(server, tools=[WEATHER], stream=True)]
    with_calls = [bool(event.delta.tool_calls) for event in events]
    with_text = [bool(event.delta.content) for event in events]
    assert not any(text and call for text, call in zip(with_text, with_calls, strict=True))
    assert max(index for index, call in enumerate(with_calls) if call) < with_text.index(True)
    assert events[-1].finish_reason == "tool_calls"


ARGUMENTS_OF_MODELS = [
    ("{", {"invalid_json": "{"}),
    ('{"a": 1} </tool_call>', {"invalid_json": '{"a": 1} </tool_call>'}),
    ("[1]", {"invalid_json": "[1]"}),
    ('"a"', {"invalid_json": '"a"'}),
    ('{"a": [NaN]}', {"invalid_json": '{"a": [NaN]}'}),
    ('{"a": 1e400}', {"invalid_json": '{"a": 1e400}'}),
    ('{"a": "\\ud800"}', {"a": "\ufffd"}),
    ("[" * 100, {"invalid_json": "[" * 100}),
    ('{"a": 1, "a": 2}', {"a": 2}),
    ("null", {}),
    ("", {}),
    (None, {}),
]


@pytest.mark.parametrize(("arguments", "rendered"), ARGUMENTS_OF_MODELS)
def test_any_arguments_can_be_sent_back(
    talker: ScriptedGenerator, arguments: str | None, rendered: dict[str, Any]
) -> None:
    call = {"call_id": "a", "name": "f", "arguments": arguments or ""}
    with scripted(talker) as server:
        create(server, messages=[*MESSAGES, past_call(arguments), *MESSAGES])
        prompt = talker.tokenizer.decode(server.llm.submitted[-1].prompt, skip_special_tokens=False)
        item = {"type": "function_call", **call}
        user = {"role": "user", "content": "Weather?"}
        assert server.post("/v1/responses", input=[user, item, user]).status_code == 200
        assert server.llm.submitted[-1].prompt == server.llm.submitted[-2].prompt
    (text,) = re.findall("<tool_call>(.*)</tool_call>", prompt)
    assert json.loads(text) == {"name": "f", "arguments": rendered}


def test_a_call_cut_short_says_so(talker: ScriptedGenerator) -> None:
    with scripted(talker.replaced(script=says(CALL[:60], finish="length"))) as server:
        choice = create(server, tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "R'


@pytest.mark.parametrize("pieces", [('[{"na',), ('[{"name": "get_weather", "parameters": {"ci',)])
def test_a_required_call_cut_short_leaves_no_text(talker: ScriptedGenerator, pieces: tuple[str, ...]) -> None:
    with scripted(talker.replaced(script=says(*pieces, finish="length"))) as server:
        choice = create(server, tools=[WEATHER], tool_choice="required").choices[0]
        events = list(create(server, tools=[WEATHER], tool_choice="required", stream=True))
    assert choice.finish_reason == "length"
    assert not choice.message.content
    assert not any(event.choices[0].delta.content for event in events)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_an_event_has_one_entry_for_each_call(talker: ScriptedGenerator, choice: Any) -> None:
    """A call has one entry in each event: LangChain loses the arguments of a second entry with the same
    index."""
    arguments = '{"city": "Rome", "days": 2}'
    text = (
        arguments if isinstance(choice, dict) else f'[{{"name": "get_weather", "parameters": {arguments}}}]'
    )
    with scripted(talker.replaced(script=says(text))) as server:
        events = list(create(server, tools=[WEATHER], tool_choice=choice, stream=True))
    entries = [event.choices[0].delta.tool_calls for event in events if event.choices[0].delta.tool_calls]
    assert [[entry.index for entry in event] for event in entries] == [[0]]
    assert entries[0][0].function.arguments == arguments


def test_a_format_beside_tools_is_that_of_answers_without_calls(talker: ScriptedGenerator) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "mood", "schema": {"enum": ["glad"]}}}
    with scripted(talker.replaced(script=says('"glad"'))) as server:
        reply = create(server, tools=[WEATHER], response_format=format)
        assert reply.choices[0].message.content == '"glad"'
        schemas = json.loads(server.llm.submitted[-1].params.grammar.text)["schemas"]
        assert schemas["answer"] == {"enum": ["glad"]}
        create(server, tools=[WEATHER], response_format=format, tool_choice="required")
        assert "glad" not in server.llm.submitted[-1].params.grammar.text  # no other answer is possible


def test_a_model_writes_calls_or_the_format(server: Served) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "mood", "schema": {"enum": ["glad", "sad"]}}}
    for seed in range(3):
        fields: Any = {"tools": [TIME], "response_format": format, "max_tokens": 40}
        message = create(server, **fields, seed=seed).choices[0].message
        called = message.tool_calls or "<tool_call>" in message.content  # may be truncated
        assert called or message.content in ('"glad"', '"sad"')


def test_a_reply_with_calls_is_sent_back_with_their_results(talker: ScriptedGenerator) -> None:
    with scripted(talker.replaced(script=says("<think>Hm</think>", CALL))) as server:
        message = create(server, tools=[WEATHER]).choices[0].message
        call = message.tool_calls[0]
        messages = [
            *MESSAGES,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "sunny"}]},
        ]
        create(server, messages=messages, tools=[WEATHER])
        prompt = talker.tokenizer.decode(server.llm.submitted[-1].prompt, skip_special_tokens=False)
    assert "<think>Hm</think>" in prompt
    assert (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>' in prompt
    )
    assert "<|im_start|>tool\nsunny" in prompt


def test_thoughts_come_apart_from_the_answer(talker: ScriptedGenerator) -> None:
    with scripted(
        talker.replaced(script=says("<th", "ink>\nSo ", "what?\n</thi", "nk>\n\nYes", "."))
    ) as server:
        message = create(server).choices[0].message
        assert (message.reasoning_content, message.reasoning, message.content) == ("So what?",) * 2 + (
            "Yes.",
        )
        deltas = [event.choices[0].delta for event in create(server, stream=True)]
        thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
        assert "".join(thoughts) == "So what?"
        assert thoughts == [getattr(delta, "reasoning", None) or "" for delta in deltas]
        assert "".join(delta.content or "" for delta in deltas) == "Yes."
        quiet = create(server, extra_body={"include_reasoning": False}).choices[0].message
        assert (quiet.content, getattr(quiet, "reasoning_content", None)) == ("Yes.", None)
        closed = create(server, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        message = closed.choices[0].message  # The model reasons although reasoning was disabled.
        assert (message.reasoning_content, message.content) == ("So what?", "Yes.")


def test_a_form_begins_behind_the_thought(talker: ScriptedGenerator) -> None:
    with scripted(talker) as server:
        for kwargs, after in (({}, "</think>"), ({"enable_thinking": False}, "")):
            create(server, extra_body={"guided_regex": "a", "chat_template_kwargs": kwargs})
            grammar = server.llm.submitted[-1].params.grammar
            assert (grammar.text, grammar.after) == ("a", after)


def past_call(arguments: Any) -> dict[str, Any]:
    """Return a message with a tool call of the model."""
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools", "tools[0] must have the type function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "1 to 128 letters"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
            "tools",
            "strict must be true or false",
        ),
        ({"tools": [TIME, TIME]}, "tools", "two tools called get_time"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools",
            "must be a JSON schema of type object",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [TIME], "tool_choice": "get_time"}, "tool_choice", "must be one of none, auto, required"),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "there is no tool called 'g'",
        ),
        ({"tools": [TIME], "guided_regex": "a"}, "guided_regex", "cannot be combined with tools"),
        (
            {"messages": [*MESSAGES, past_call(5)]},
            "messages",
            "messages[1].tool_calls[0].function.arguments must be JSON text, or a JSON object",
        ),
    ],
)
def test_refusals(server: Served, fields: dict[str, Any], param: str, message: str) -> None:
    response = server.post("/v1/chat/completions", **{"messages": MESSAGES, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert message in response.json()["error"]["message"]


def function(name: str, parameters: Any, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def test_annotations_of_a_function_that_is_not_strict(server: Served) -> None:
    """Annotations of a function that is not strict are left out of the grammar for a required call, and
    named."""
    tags = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3, "uniqueItems": True}
    schema = {
        "type": "object",
        "properties": {"tags": tags},
        "required": ["tags"],
        "additionalProperties": False,
    }
    fields: Any = {
        "messages": MESSAGES,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    response = server.post("/v1/chat/completions", tools=[function("tag", schema)], **fields)
    assert response.status_code == 200, response.text
    assert "uniqueItems in a schema, as no grammar enforces it" in response.headers["warning"]
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])["tags"]) <= {"a", "b"}
    for choice in ("required", "auto"):
        tools = [TIME, function("tag", schema, strict=True)]
        response = server.post("/v1/chat/completions", tools=tools, **{**fields, "tool_choice": choice})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tools")
        assert error["message"].startswith("tools[1].function.parameters.properties.tags: uniqueItems is not")


def test_the_function_whose_schema_cannot_be_compiled_is_named(server: Served) -> None:
    broken = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(("}}}
    tools = [WEATHER, function("broken", broken)]
    response = server.post("/v1/chat/completions", messages=MESSAGES, tools=tools, tool_choice="required")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert error["message"].startswith("tools[1].function.parameters cannot be compiled: ")


@pytest.mark.parametrize("name", ["github:list_issues", "mcp/fs/read", "a.b-c_d", "n" * 128])
def test_names_that_clients_give_functions(talker: ScriptedGenerator, name: str) -> None:
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    with scripted(talker.replaced(script=says(text))) as server:
        reply = create(server, tools=[function(name, {"type": "object"})])
    (call,) = reply.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == (name, "{}")


def test_several_hundred_tools(talker: ScriptedGenerator) -> None:
    names = [f"tool{number}" for number in range(300)]
    long = talker.replaced(model=msgspec.structs.replace(talker.model, max_model_len=1 << 20), submitted=[])
    with scripted(long.replaced(script=says("hi"))) as server:
        create(server, tools=[function(name, {"type": "object"}) for name in names])
    prompt = long.tokenizer.decode(long.submitted[-1].prompt)
    assert [name for name in names if f'"{name}"' not in prompt] == []


def test_a_model_without_a_way_to_call_says_so(hello: Served) -> None:
    response = hello.post("/v1/chat/completions", messages=MESSAGES, tools=[TIME])
    assert response.status_code == 400
    assert "--tool-parser" in response.json()["error"]["message"]


FAMILIES = {
    "qwen3_coder": (
        "<tool_call><function=f><parameter=",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    ),
    "granite": (
        "<|start_of_role|><|tool_call|>",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]',
    ),
    "phi4_mini": (
        "<|tool|>",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]<|/tool_call|>',
    ),
    "gemma": ("<start_of_turn>", '```tool_code\nget_weather(city="Rome", days=2)\n```'),
    "functiongemma": (
        "<start_function_call>",
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>,days:2}<end_function_call>",
    ),
    "olmo3": ("<function_calls>", "<function_calls>\nget_weather(city='Rome', days=2)\n</function_calls>"),
    "mistral": ("[TOOL_CALLS]", '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 2}'),
    "harmony": (
        "<|channel|><|message|>",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Rome", "days": 2}<|call|>',
    ),
}
"""For each model family: a feature of its template, and a call in its format."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_of_each_family(tmp_path: Path, family: str, size: int) -> None:
    mark, call = FAMILIES[family]
    folder = byte_level_folder(
        tmp_path, chat_template="{# " + mark + " #}" + TEMPLATE.replace("<tool_call>", "")
    )
    generator = ScriptedGenerator(Tokenizer.from_folder(folder))
    generator = generator.replaced(model=msgspec.structs.replace(generator.model, max_model_len=4096))
    pieces = [call[start : start + size] for start in range(0, len(call), size)]
    with scripted(generator.replaced(script=says(*pieces))) as server:
        whole = create(server, tools=[WEATHER]).choices[0]
        events = [event.choices[0].delta for event in create(server, tools=[WEATHER], stream=True)]
        text = create(server, tools=[TIME]).choices[0].message
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (called,) = whole.message.tool_calls
    assert called.function.name == "get_weather"
    assert json.loads(called.function.arguments) == {"city": "Rome", "days": 2}
    deltas = [delta.tool_calls for delta in events if delta.tool_calls]
    assert all(len(calls) == 1 for calls in deltas)
    assert "".join(calls[0].function.arguments for calls in deltas) == called.function.arguments
    assert text.tool_calls is None
    assert text.content in (call, call.removesuffix("<|call|>"))


def test_harmony_cannot_be_constrained(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, chat_template="{# <|channel|><|message|> #}" + TEMPLATE)
    generator = ScriptedGenerator(Tokenizer.from_folder(folder))
    generator = generator.replaced(model=msgspec.structs.replace(generator.model, max_model_len=4096))
    with scripted(generator) as server:
        for fields in ({"tools": [TIME], "tool_choice": "required"}, {"guided_regex": "a"}):
            response = server.post("/v1/chat/completions", messages=MESSAGES, **fields)
            assert response.status_code == 400
            assert "harmony, cannot be constrained" in response.json()["error"]["message"]


EFFORTS = "{{ messages[0].content }}|{{ reasoning_effort }}|{{ enable_thinking }}|{{ thinking }}"


@pytest.mark.parametrize(
    ("template", "fields", "rendered"),
    [
        (EFFORTS, {"reasoning_effort": "low"}, "Weather?|low|True|"),
        (EFFORTS, {"reasoning_effort": "none"}, "Weather?|none|False|"),
        (EFFORTS, {"enable_thinking": True}, "Weather?||True|"),
        (EFFORTS, {"reasoning_effort": "high", "enable_thinking": False}, "Weather?|high|False|"),
        (
            EFFORTS,
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "Weather?||False|",
        ),
        ("{{ messages[0].content }}|{{ thinking }}", {"enable_thinking": False}, "Weather?|False"),
        ("{{ messages[0].content }}|{{ thinking }}", {"reasoning_effort": "medium"}, "Weather?|True"),
    ],
)
def test_templates_are_told_whether_to_reason(
    tmp_path: Path, template: str, fields: dict[str, Any], rendered: str
) -> None:
    folder = byte_level_folder(tmp_path, chat_template=template)
    with scripted(ScriptedGenerator(Tokenizer.from_folder(folder), script=says("x"))) as server:
        reply = server.post("/v1/chat/completions", messages=MESSAGES, **fields)
        assert "warning" not in reply.headers
        prompt = server.llm.submitted[-1].prompt
        assert server.llm.tokenizer.decode(prompt) == rendered
        if "reasoning_effort" in fields and len(fields) == 1:
            effort = {"effort": fields["reasoning_effort"]}
            assert server.post("/v1/responses", input="Weather?", reasoning=effort).status_code == 200
            assert server.llm.submitted[-1].prompt == prompt


def test_an_unknown_effort_is_refused(hello: Served) -> None:
    for route, fields in (
        ("/v1/chat/completions", {"messages": MESSAGES, "reasoning_effort": "much"}),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "much"}}),
    ):
        response = hello.post(route, **fields)
        assert response.status_code == 400
        assert "reasoning" in response.json()["error"]["param"]
