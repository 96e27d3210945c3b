"""With response_format and similar fields the answer has the requested format, and errors name the field."""

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.api.serving import Served

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "Where to?"}]
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def answer(server: Served, route: str = CHATS, **fields: Any) -> tuple[str, str]:
    body = {"messages": MESSAGES} if route == CHATS else {"prompt": "Where to?"}
    response = server.post(route, **{**body, "max_tokens": 300, "temperature": 1.0, "seed": 3, **fields})
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["message"]["content"] if route == CHATS else choice["text"], choice["finish_reason"]


@pytest.mark.parametrize("route", [CHATS, COMPLETIONS])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "regex": None}},
    ],
)
def test_a_schema_is_followed(server: Served, route: str, fields: dict[str, Any]) -> None:
    text, finish = answer(server, route, **fields)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert finish == "stop"
    if "disable_any_whitespace" in fields.get("structured_outputs", {}):
        assert not re.search(r"\s", text)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}/[a-c]"}, "[0-9]{3}/[a-c]"),
        ({"structured_outputs": {"regex": "(ab){2}"}}, "(ab){2}"),
        ({"guided_choice": ["yes", 'no "way"']}, 'yes|no "way"'),
        ({"structured_outputs": {"choice": ["on", "off"]}}, "on|off"),
        ({"guided_grammar": 'start: "<" /[xy]{3}/ ">"'}, "<[xy]{3}>"),
        ({"guided_grammar": 'root ::= "a" [0-9] [0-9]'}, "a[0-9]{2}"),
    ],
)
def test_other_formats_are_followed(server: Served, fields: dict[str, Any], pattern: str) -> None:
    for route in (CHATS, COMPLETIONS):
        text, finish = answer(server, route, **fields)
        assert re.fullmatch(pattern, text)
        assert finish == "stop"


def test_any_object_will_do(server: Served) -> None:
    """Keys and strings may have any length, so with a token limit the answer is the beginning of an
    object."""
    text, finish = answer(server, response_format={"type": "json_object"}, max_tokens=60, temperature=0.0)
    assert text.startswith("{")
    if finish == "stop":
        assert isinstance(json.loads(text), dict)


def test_the_openai_client_parses_it(server: Served) -> None:
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
    stream = server.client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format=response_format,
        max_tokens=300,
        seed=1,
        n=2,
        stream=True,
    )
    texts = {0: "", 1: ""}
    for event in stream:
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    for text in texts.values():
        jsonschema.validate(json.loads(text), SCHEMA)


def test_with_other_wishes(server: Served) -> None:
    # The format takes precedence over min_tokens, and the answer ends only where the format requires it.
    assert answer(server, guided_regex="ab?", min_tokens=20, ignore_eos=False)[0] == "ab"
    assert answer(server, guided_regex="a{1,50}", min_tokens=20)[0] == "a" * 50
    assert len(answer(server, guided_regex="a{1,50}", min_tokens=20, ignore_eos=False)[0]) >= 20
    assert answer(server, guided_regex="ab*c", stop=["c"])[0].startswith("a")
    assert answer(server, guided_regex="a{50}", max_tokens=7) == ("a" * 7, "length")
    assert answer(server, guided_choice=["good", "bad"], logprobs=True, logit_bias={"5": 100.0})[1] == "stop"


def test_a_seed_gives_the_same_answer_in_a_stream_of_others(server: Served) -> None:
    alone = [answer(server, guided_json=SCHEMA, seed=seed)[0] for seed in range(4)]
    together = server.post(
        COMPLETIONS, prompt=["Where to?"] * 4, guided_regex="[ab]{8}", max_tokens=300, temperature=1.0, seed=9
    ).json()
    assert len({choice["text"] for choice in together["choices"]}) == 1
    assert [answer(server, guided_json=SCHEMA, seed=seed)[0] for seed in range(4)] == alone


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be an object with a schema"),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "response_format",
            "response_format.schema is not",
        ),
        (
            {"response_format": {"type": "json_object", "strict": True}},
            "response_format",
            ".strict is not a known",
        ),
        (
            {"response_format": {"type": "json_object", "schema": "a"}},
            "response_format",
            "must be a JSON schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "lax": True}}},
            "response_format",
            "lax is not a known field",
        ),
        ({"guided_json": "{"}, "guided_json", "guided_json is not JSON"),
        ({"guided_json": {"type": "objekt"}}, "guided_json", "cannot be compiled"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": {"pattern": "x" * 70_000}}, "guided_json", "at most 65536 bytes are allowed"),
        ({"guided_json": False}, "guided_json", "at least one value"),
        ({"guided_regex": "(("}, "guided_regex", "unclosed group"),
        ({"guided_regex": "(a|b)*" * 1000}, "guided_regex", "at most 2000 are allowed"),
        ({"guided_choice": []}, "guided_choice", "non-empty"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "cannot be compiled"),
        ({"guided_grammar": "root ::= ((("}, "guided_grammar", "cannot be read"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs",
            "structural_tag is not supported",
        ),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs",
            "needs a JSON schema",
        ),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "cannot be combined"),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids", "cannot be combined"),
    ],
)
def test_refusals(server: Served, fields: dict[str, Any], param: str, message: str) -> None:
    for route, body in ((CHATS, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "x"})):
        response = server.post(route, **body, **fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert message in error["message"]
