"""A tool_choice of the type allowed_tools limits a request to the named tools."""

import json
from typing import Any

import pytest

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.openai.schemas import ChatRequest
from streamserve.api.openai.tools import Tools, requested_tools
from streamserve.protocol.errors import RequestError
from streamserve.text.tokenizer import Tokenizer
from tests.api.tool_calls import TEMPLATE
from tests.text.folders import byte_level_folder

SCHEMA = {"type": "object", "properties": {"i": {"type": "integer"}}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]},
    }


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder(tmp_path_factory.mktemp("tools"), chat_template=TEMPLATE))


def used(tokenizer: Tokenizer, tools: list[dict[str, Any]], choice: Any) -> Tools | None:
    request = ChatRequest(messages=[{"role": "user", "content": "hi"}], tools=tools, tool_choice=choice)
    return requested_tools(request, "auto", tokenizer, "", IgnoredFields(strict=False))


TOOLS = [function("a"), function("b", strict=True), function("c")]


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("names", [["a"], ["c", "b"], ["a", "b", "c"], ["a", "a"]])
def test_other_tools_do_not_exist(tokenizer: Tokenizer, mode: str, names: list[str]) -> None:
    some = [tool for tool in TOOLS if tool["function"]["name"] in names]
    restricted = used(tokenizer, TOOLS, allowed(*names, mode=mode))
    alone = used(tokenizer, some, mode)
    assert restricted is not None
    assert alone is not None
    assert (restricted.rendered, restricted.schemas) == (some, alone.schemas)
    assert (restricted.grammar, restricted.format, restricted.named) == (alone.grammar, alone.format, None)


def test_a_schema_is_named_where_the_client_sent_it(tokenizer: Tokenizer) -> None:
    restricted = used(tokenizer, TOOLS, allowed("b", "c", mode="required"))
    assert restricted is not None
    assert list(restricted.constrained) == ["tools[1].function.parameters", "tools[2].function.parameters"]
    called = json.loads(restricted.grammar.text if restricted.grammar else "")["items"]["anyOf"]
    assert [each["properties"]["name"]["const"] for each in called] == ["b", "c"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, "must have the mode auto or required, and a list of tools"),
        ({"mode": "none", "tools": [named("a")]}, "must have the mode auto or required, and a list of tools"),
        ({"mode": [], "tools": [named("a")]}, "must have the mode auto or required, and a list of tools"),
        ({"mode": "auto", "tools": []}, "must have the mode auto or required, and a list of tools"),
        ({"mode": "auto", "tools": ["a"]}, "must name a function"),
        ({"mode": "auto", "tools": [{"type": "mcp", "server_label": "a"}]}, "must name a function"),
        ({"mode": "auto", "tools": [named("d")]}, "there is no tool called 'd'"),
    ],
)
def test_refusals(tokenizer: Tokenizer, settings: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        used(tokenizer, TOOLS, {"type": "allowed_tools", "allowed_tools": settings})
    assert raised.value.field == "tool_choice"
