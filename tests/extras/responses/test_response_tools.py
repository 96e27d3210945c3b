"""Tools work as Codex sends them: namespaces, custom tools, and built-in tools that this server does not
run."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.extras.responses.response_tools import flat_name, response_tools
from streamserve.protocol.grammar import to_llguidance
from streamserve.text.grammar import GrammarCheck, compiler
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import ScriptedGenerator, Served, scripted
from tests.api.tool_calls import says
from tests.text import patch_grammar
from tests.text.folders import byte_level_folder

ROUTE = "/v1/responses"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
SPAWN = {
    "type": "function",
    "name": "spawn_agent",
    "description": "Start an agent.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]},
}
WAIT = {"type": "function", "name": "wait", "strict": False, "parameters": {"type": "object"}}
AGENTS = {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [SPAWN, WAIT]}
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'},
}
DATE: Any = {"type": "grammar", "syntax": "regex", "definition": r'on "\d{4}"\n|never'}
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object"}}
BUILT_IN = [{"type": "web_search", "external_web_access": True}, {"type": "image_generation"}]
TOOLS = [SHELL, PATCH, *BUILT_IN, AGENTS, {"type": "local_shell"}]


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def agent(generator: ScriptedGenerator, tmp_path: Path) -> ScriptedGenerator:
    """A model with a long context that calls a tool of each kind."""
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path, chat_template=TEMPLATE))
    model = msgspec.structs.replace(generator.model, max_model_len=8192)
    text = "\n".join(
        (
            call("multi_agent_v1__spawn_agent", {"task": "read"}),
            call("apply_patch", {"input": '*** Begin Patch\n"ä"'}),
            call("shell", {}),
        )
    )
    pieces = [text[start : start + 3] for start in range(0, len(text), 3)]
    return generator.replaced(tokenizer=tokenizer, model=model, submitted=[], script=says(*pieces))


def prompt_of(generator: ScriptedGenerator) -> str:
    return generator.tokenizer.decode(generator.submitted[-1].prompt, skip_special_tokens=False)


def rendered_functions(generator: ScriptedGenerator) -> list[Any]:
    lines = prompt_of(generator).split("<|im_start|>")[0].splitlines()
    return [json.loads(line) for line in lines]


def test_namespaces_and_custom_tools_are_functions_of_the_prompt(agent: ScriptedGenerator) -> None:
    with scripted(agent) as server:
        response = server.post(ROUTE, input="hi", tools=TOOLS)
    assert response.status_code == 200, response.text
    shell, patch, spawn, wait = rendered_functions(agent)
    assert [each["name"] for each in (shell, patch, spawn, wait)] == [
        "shell",
        "apply_patch",
        "multi_agent_v1__spawn_agent",
        "multi_agent_v1__wait",
    ]
    assert (spawn["description"], "description" in wait) == ("Agents.\n\nStart an agent.", False)
    assert spawn["parameters"] == SPAWN["parameters"]
    assert patch["description"] == (
        'Edit files.\n\nThe input must match this grammar in Lark:\nstart: "*** Begin Patch" /.+/'
    )
    assert patch["parameters"]["required"] == ["input"]
    assert response.headers["warning"] == (
        '299 streamserve "without effect: tools[web_search], tools[image_generation], tools[local_shell]"'
    )


def test_calls_are_items_that_codex_dispatches(agent: ScriptedGenerator) -> None:
    """Calls are items that Codex dispatches by namespace and name. The input of a custom tool is its text."""
    with scripted(agent) as server:
        whole = server.post(ROUTE, input="hi", tools=TOOLS).json()["output"]
        text = server.post(ROUTE, input="hi", tools=TOOLS, stream=True).text
    spawn, patch, shell = whole
    assert {key: spawn[key] for key in ("type", "namespace", "name", "status")} == {
        "type": "function_call",
        "namespace": "multi_agent_v1",
        "name": "spawn_agent",
        "status": "completed",
    }
    assert json.loads(spawn["arguments"]) == {"task": "read"}
    assert (patch["type"], patch["name"], patch["input"]) == (
        "custom_tool_call",
        "apply_patch",
        '*** Begin Patch\n"ä"',
    )
    assert ("namespace" in patch, "namespace" in shell, shell["name"]) == (False, False, "shell")
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [{**item, "id": "", "call_id": ""} for item in done] == [
        {**item, "id": "", "call_id": ""} for item in whole
    ]
    custom = [event for event in events if event["type"].startswith("response.custom_tool_call_input.")]
    assert [event["type"].rpartition(".")[2] for event in custom] == ["delta", "done"]
    assert custom[0]["delta"] == custom[1]["input"] == patch["input"]
    assert {event["item_id"] for event in custom} == {done[1]["id"]}


def test_openais_client_parses_the_items(agent: ScriptedGenerator) -> None:
    with scripted(agent) as server:
        tools: Any = TOOLS
        response = server.client.responses.create(model="scripted", input="hi", tools=tools)
        with server.client.responses.stream(model="scripted", input="hi", tools=tools) as stream:
            streamed = stream.get_final_response()
    outputs: Any = (response.output, streamed.output)
    for output in outputs:
        spawn, patch, _ = output
        assert (spawn.type, patch.type) == ("function_call", "custom_tool_call")
        assert spawn.namespace == "multi_agent_v1"
        assert patch.input == '*** Begin Patch\n"ä"'


def test_calls_and_their_outputs_go_back_to_the_model(agent: ScriptedGenerator) -> None:
    with scripted(agent) as server:
        output = server.post(ROUTE, input="hi", tools=TOOLS, store=True).json()
        answers = [
            {"type": item["type"] + "_output", "call_id": item["call_id"], "output": f"done {number}"}
            for number, item in enumerate(output["output"])
        ]
        history = [{"role": "user", "content": "hi"}, *output["output"], *answers]
        assert server.post(ROUTE, input=history, tools=TOOLS).status_code == 200
        whole = prompt_of(agent)
        kept = server.post(ROUTE, input=answers, previous_response_id=output["id"], tools=TOOLS)
        assert kept.status_code == 200
        assert prompt_of(agent) == whole
        listed = server.http.get(f"{ROUTE}/{kept.json()['id']}/input_items").json()["data"]
    assert {item["id"].partition("_")[0] for item in listed} >= {"ctco", "fco"}
    calls = [json.loads(part.split("</tool_call>")[0]) for part in whole.split("<tool_call>")[1:]]
    assert calls == [
        {"name": "multi_agent_v1__spawn_agent", "arguments": {"task": "read"}},
        {"name": "apply_patch", "arguments": {"input": '*** Begin Patch\n"ä"'}},
        {"name": "shell", "arguments": {}},
    ]
    assert whole.endswith("".join(f"<|im_start|>tool\ndone {number}<|im_end|>\n" for number in range(3)))


def test_items_of_other_servers_tools_are_left_out(agent: ScriptedGenerator) -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    shell = {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": {"type": "exec"}}
    with scripted(agent) as server:
        items = [search, {"role": "user", "content": "hi"}, shell]
        response = server.post(ROUTE, input=items, store=True)
        assert response.headers["warning"] == (
            '299 streamserve "without effect: input[web_search_call], input[local_shell_call]"'
        )
        assert prompt_of(agent) == "<|im_start|>user\nhi<|im_end|>\n"
        only = server.post(ROUTE, input=[search])
        assert (only.status_code, only.json()["error"]["param"]) == (400, "input")


def test_a_namespaced_or_custom_tool_can_be_forced(agent: ScriptedGenerator) -> None:
    with scripted(agent.replaced(script=says('{"input": "a"}'))) as server:
        for choice in (
            {"type": "custom", "name": "apply_patch"},
            {"type": "function", "name": "wait", "namespace": "multi_agent_v1"},
        ):
            response = server.post(ROUTE, input="hi", tools=TOOLS, tool_choice=choice)
            assert response.status_code == 200, response.text
            (item,) = response.json()["output"]
            assert (item["name"], item.get("namespace")) == (choice["name"], choice.get("namespace"))


def test_some_of_the_tools_can_be_allowed(agent: ScriptedGenerator) -> None:
    tools = [PATCH, {"type": "function", "name": "wait", "namespace": "multi_agent_v1"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "apply_patch"}]}
    with scripted(agent) as server:
        response = server.post(
            ROUTE, input="hi", tools=TOOLS, tool_choice={**choice, "tools": [*tools, *BUILT_IN]}
        )
        assert [each["name"] for each in rendered_functions(agent)] == ["apply_patch", "multi_agent_v1__wait"]
        (patch,) = [item for item in response.json()["output"] if item["type"] == "custom_tool_call"]
        assert patch["name"] == "apply_patch"
        assert server.post(
            ROUTE, input="hi", tools=TOOLS, tool_choice={**choice, "tools": BUILT_IN}
        ).is_success
        assert rendered_functions(agent) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "required", "tools": BUILT_IN}, "tool_choice: allowed_tools must have the mode"),
        ({"tools": ["a"]}, "tool_choice: type None is not supported"),
        ({"tools": [{"type": "mcp"}]}, "tool_choice: type 'mcp' is not supported"),
        (
            {"tools": None},
            "tool_choice: allowed_tools must have the mode auto or required, and a list of tools",
        ),
        ({"tools": [{"type": "function", "name": "g"}]}, "tool_choice: there is no tool called 'g'"),
    ],
)
def test_other_allowed_tools_are_refused(hello: Served, change: Any, message: str) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", **change}
    error = hello.post(ROUTE, input="hi", tools=[SHELL], tool_choice=choice).json()["error"]
    assert error["param"] == "tool_choice"
    assert error["message"].startswith(message)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{"type": "namespace", "name": "a"}], "tools[0].tools must be a list of tools"),
        ([{"type": "namespace", "tools": []}], "tools[0].name must be the namespace's name"),
        ([{**AGENTS, "tools": [{"type": "mcp"}]}], "tools[0].tools[0] must have the type function or custom"),
        ([{**PATCH, "format": {"type": "xml"}}], "tools[0].format must have a type: text or grammar"),
        ([{**PATCH, "format": {"type": "grammar"}}], "tools[0].format must have a syntax, lark or regex"),
        ([{"type": "mcp"}], "tools[0]: type 'mcp' is not supported"),
        ([SHELL, SHELL], "tools[1].name: there are two tools called shell"),
        (
            [*BUILT_IN, {**AGENTS, "tools": [SPAWN, {**WAIT, "parameters": 5}]}],
            "tools[2].tools[1].parameters must be a JSON schema",
        ),
    ],
)
def test_errors_name_the_tool_where_the_client_sent_it(hello: Served, tools: Any, message: str) -> None:
    response = hello.post(ROUTE, input="hi", tools=tools)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools"), error
    assert message in error["message"]


@pytest.mark.parametrize(
    ("syntax", "definition"), [("regex", "(?=a)b"), ("lark", "start: a"), ("lark", 'begin: "a"')]
)
def test_a_grammar_that_does_not_compile_is_refused(
    agent: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch, syntax: str, definition: str
) -> None:
    check = GrammarCheck(compiler(agent.tokenizer, 320, (3,)), 1 << 16, 600.0)
    monkeypatch.setattr(type(agent), "check_grammar", lambda self, grammar, field: check(grammar, field))
    tool = {"type": "custom", "name": "when", "format": {**DATE, "syntax": syntax, "definition": definition}}
    with scripted(agent) as server:
        response = server.post(ROUTE, input="hi", tools=[*BUILT_IN, SHELL, tool])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert error["message"].startswith("tools[3].format cannot be compiled: ")


def test_codex_tools_follow_their_grammar(agent: ScriptedGenerator) -> None:
    tools = [*TOOLS[2:], SHELL, {**PATCH, "format": {**PATCH["format"], "definition": patch_grammar.LARK}}]
    with scripted(agent) as server:
        response = server.post(ROUTE, input="hi", tools=tools, tool_choice="auto", parallel_tool_calls=False)
    assert response.status_code == 200, response.text
    assert "tools[].format" not in response.headers["warning"]
    grammar = agent.submitted[-1].params.grammar
    assert grammar is not None
    for texts, fits in ((patch_grammar.GOOD, True), (patch_grammar.BAD, False)):
        for text in texts:
            arguments = json.dumps({"input": text}, ensure_ascii=False)
            data = f'<tool_call>{{"name": "apply_patch", "arguments": {arguments}}}</tool_call>'.encode()
            matcher = LLMatcher(LLTokenizer("byte"), to_llguidance(grammar), log_level=0)
            assert (matcher.try_consume_tokens(list(data)) == len(data)) is fits, text


def test_strict_fields_refuse_what_is_left_out(strict: Served) -> None:
    negated = {**PATCH, "format": {**PATCH["format"], "definition": 'start: A\nA: ~"a"'}}
    for tool in (*BUILT_IN, negated):
        response = strict.post(ROUTE, input="hi", tools=[tool])
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "name": "when"}])
def test_a_regular_expression_constrains_the_input(agent: ScriptedGenerator, choice: Any) -> None:
    tool = {"type": "custom", "name": "when", "format": DATE}
    with scripted(agent) as server:
        response = server.post(ROUTE, input="hi", tools=[tool, SHELL], tool_choice=choice)
    assert response.status_code == 200, response.text
    assert "warning" not in response.headers
    assert "The input must match this regular expression" in prompt_of(agent)
    grammar = agent.submitted[-1].params.grammar
    assert grammar is not None
    for text, fits in (('on "2026"\n', True), ("never", True), ('on "26', False), ("nevermore", False)):
        arguments = json.dumps({"input": text})
        written = {
            "auto": f'Hm.<tool_call>{{"name": "when", "arguments": {arguments}}}</tool_call>',
            "required": f'[{{"name": "when", "parameters": {arguments}}}]',
        }.get(str(choice), arguments)
        matcher = LLMatcher(LLTokenizer("byte"), to_llguidance(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        assert (matcher.try_consume_tokens(list(written.encode())) == len(written)) is fits


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from([None, "mcp__a__", "b"]), st.sampled_from(["x", "_y"])), unique=True)
)
def test_every_function_leads_to_its_tool(pairs: list[tuple[str | None, str]]) -> None:
    tools: list[dict[str, Any]] = [
        {"type": "function", "name": name}
        if namespace is None
        else {"type": "namespace", "name": namespace, "tools": [{"type": "custom", "name": name}]}
        for namespace, name in pairs
    ]
    converted = response_tools(tools, IgnoredFields(strict=True))
    names = [tool[tool["type"]]["name"] for tool in converted.converted]
    origins = [converted.origin(name) for name in names]
    assert [(origin.namespace, origin.name) for origin in origins] == pairs
    assert names == [flat_name(*pair) for pair in pairs]
