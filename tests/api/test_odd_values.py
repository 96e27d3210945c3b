"""The server replies to any value in any place of a request's body, without an internal error."""

import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from streamserve.api.app import create_app
from streamserve.api.settings import ApiSettings
from streamserve.contracts.embedding import EmbeddingConfig
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import ScriptedGenerator
from tests.api.tool_calls import TEMPLATE
from tests.conftest import Scale
from tests.text.folders import byte_level_folder

SMALL: list[Any] = [[]]
FULL: list[Any] = [
    *SMALL,
    *({}, 5, None, True, False, 0, -1, 1.5, 2**63, -(2**64), 1e308, "", "x", "\0", "null"),
    *([[]], [{}], [None], ["x"], {"a": 1}, {"type": []}, {"type": {}}, {"type": "text"}),
    *({"type": "function"}, [{"type": "text", "text": 5}]),
]

SCHEMA: Any = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "x-guidance": {}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TOOL = {"type": "custom", "name": "f", "input_schema": SCHEMA, "strict": True, "cache_control": {}}
CALL = {"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: Any = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": ""},
            {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "i", "name": "f", "input": {"a": "x"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "i",
                "content": [{"type": "text", "text": "r"}],
                "is_error": True,
            }
        ],
    },
]
ITEMS: Any = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}], "id": "m"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}], "summary": [], "id": "r"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc"},
    {"type": "function_call_output", "call_id": "c", "output": "o", "status": "completed"},
]
LARK = {"syntax": "lark", "definition": 'start: A\nA: /a"/'}
CUSTOM = {"name": "c", "description": "d", "format": {"type": "grammar", "grammar": LARK}}
CUSTOM_CALL = {"id": "i", "type": "custom", "custom": {"name": "c", "input": "x"}}
CHAT: Any = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "i", "content": "x"},
]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/messages",
        {
            "max_tokens": 4,
            "messages": MESSAGES,
            "system": [{"type": "text", "text": "s"}],
            "tools": [TOOL],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
            "output_config": {"effort": "low"},
            "stop_sequences": ["x"],
            "metadata": {"user_id": "u"},
        },
    ),
    (
        "/v1/messages/count_tokens",
        {
            "messages": MESSAGES[:1],
            "tools": [TOOL],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "disabled"},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    (
        "/v1/responses",
        {
            "input": ITEMS,
            "instructions": "i",
            "max_output_tokens": 4,
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "metadata": {"a": "b"},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
        },
    ),
    (
        "/v1/responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": CHAT,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "reasoning_effort": "low",
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"a": 1},
            "slo": {"ttft_ms": 5},
            "logit_bias": {"5": 1},
        },
    ),
    ("/v1/chat/completions", {"messages": CHAT[:1], "max_tokens": 4, "response_format": FORMAT}),
    (
        "/v1/chat/completions",
        {
            "messages": [*CHAT[:1], {"role": "assistant", "tool_calls": [CUSTOM_CALL]}],
            "tools": [{"type": "custom", "custom": CUSTOM}],
            "tool_choice": {"type": "custom", "custom": {"name": "c"}},
        },
    ),
    (
        "/v1/responses",
        {
            "input": [*ITEMS[:1], {"type": "custom_tool_call", "call_id": "c", "name": "c", "input": "x"}],
            "tools": [{"type": "custom", "name": "c", "format": {"type": "grammar", **LARK}}],
            "tool_choice": {"type": "custom", "name": "c"},
        },
    ),
    ("/v1/completions", {"prompt": ["a"], "stop": ["x"], "stop_token_ids": [1], "logit_bias": {"5": 1}}),
    ("/v1/completions", {"prompt": [1], "guided_json": SCHEMA, "guided_whitespace_pattern": " "}),
    ("/v1/completions", {"prompt": [[1]], "structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"choice": ["a", "b"]}}),
    ("/v1/batches", {"input_file_id": "f", "endpoint": "/v1/responses", "completion_window": "24h"}),
    ("/v1/embeddings", {"input": ["a", [1]], "encoding_format": "float", "dimensions": 4}),
    ("/v1/rerank", {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "instruction": "i"}),
    ("/v1/score", {"text_1": ["a"], "text_2": ["b", "c"]}),
    ("/tokenize", {"messages": CHAT[:1], "tools": [{"type": "function", "function": FUNCTION}]}),
    ("/detokenize", {"tokens": [1, 2]}),
]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each value inside `value`."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*place, key)
            yield from places(value[key], (*place, key))


def replaced(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    inside: Any = changed
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    return changed


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> ScriptedGenerator:
    """A model with tools and reasoning."""
    folder = byte_level_folder(tmp_path_factory.mktemp("odd"), chat_template=TEMPLATE)
    generator = ScriptedGenerator(Tokenizer.from_folder(folder))
    return generator.replaced(model=msgspec.structs.replace(generator.model, max_model_len=4096))


@pytest.mark.parametrize(("route", "body"), BODIES, ids=lambda value: value if isinstance(value, str) else "")
async def test_odd_values(generator: ScriptedGenerator, scale: Scale, route: str, body: Any) -> None:
    embedding = EmbeddingConfig() if route in ("/v1/embeddings", "/v1/rerank", "/v1/score") else None
    for strict in (False, True) if scale.full else (False,):
        with tempfile.TemporaryDirectory() as folder:
            settings = ApiSettings(strict_fields=strict, batch_folder=str(Path(folder) / "batches"))
            app = create_app(generator.replaced(embedding=embedding), settings)
            transport = httpx.ASGITransport(app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://odd") as client:
                for place in places(body):
                    for value in FULL if scale.full else SMALL:
                        await check(client, route, replaced(body, place, value))


async def check(client: httpx.AsyncClient, route: str, body: Any) -> None:
    """Send a request. If it is stored, the stored object can be read and continued."""
    response = await client.post(route, content=json.dumps(body))
    assert response.status_code < 500, (response.text, body)
    if route != "/v1/responses" or response.status_code != 200 or not response.json()["store"]:
        return
    stored = response.json()["id"]
    items = await client.get(f"{route}/{stored}/input_items")
    again = await client.post(route, json={"input": "more", "previous_response_id": stored})
    assert (items.status_code, again.status_code) == (200, 200), (items.text, again.text, body)
