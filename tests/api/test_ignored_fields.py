"""Unknown fields and fields without effect are accepted and named in a header, the debug log and a metric; a
setting refuses them."""

import logging
from typing import Any

import httpx
import pytest

from tests.api.refusing import CHATS, COMPLETIONS, USER, refused
from tests.api.serving import Served

CONTINUOUS = "stream_options.continuous_usage_stats"
RESPONSES = "/v1/responses"
NO_VARIABLE = " without a variable for it in the chat template"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHATS: {"messages": [USER]},
    RESPONSES: {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [70]},
}


def warning(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.headers.get("warning", ""))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "fields", "named"),
    [
        (CHATS, {"reasoning_effort": "low"}, f"reasoning_effort{NO_VARIABLE}"),
        (CHATS, {"reasoning": {"effort": "low"}}, "reasoning (use reasoning_effort)"),
        (CHATS, {"thinking": True}, "thinking (use enable_thinking)"),
        (CHATS, {"session_id": "x"}, "session_id"),
        (CHATS, {"verbosity": "low"}, "verbosity"),
        (CHATS, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
        (CHATS, {"web_search_options": {}}, "web_search_options"),
        (CHATS, {"enable_thinking": False}, f"enable_thinking{NO_VARIABLE}"),
        (CHATS, {"top_logprobs": 0}, "top_logprobs without logprobs"),
        (CHATS, {"store": True}, "store"),
        (CHATS, {"service_tier": "flex"}, "service_tier"),
        (CHATS, {"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        (COMPLETIONS, {"cache_prompt": True}, "cache_prompt"),
        (COMPLETIONS, {"num_ctx": 8192}, "num_ctx"),
        (RESPONSES, {"stream_options": {"include_obfuscation": True}}, "stream_options"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, f"reasoning.effort{NO_VARIABLE}"),
        (RESPONSES, {"reasoning": {"effort": "none", "summary": "auto"}}, "reasoning.summary"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (RESPONSES, {"include": ["reasoning.encrypted_content"]}, "include[reasoning.encrypted_content]"),
    ],
)
def test_fields_without_effect(
    hello: Served, strict: Served, stream: bool, route: str, fields: dict[str, Any], named: str
) -> None:
    body = {**BODIES[route], "stream": stream}
    assert warning(hello.post(route, **body)) == ""
    assert warning(hello.post(route, **body, **fields)) == f'299 streamserve "without effect: {named}"'
    (name,) = fields
    assert refused(strict.post(route, **body, **fields))["param"] == name


@pytest.mark.parametrize("route", BODIES)
def test_unknown_fields(hello: Served, strict: Served, route: str) -> None:
    body = {**BODIES[route], "colour": 1, "mood": None}
    assert warning(hello.post(route, **body)) == '299 streamserve "unknown: colour, mood"'
    assert refused(strict.post(route, **body))["message"] == "colour is not a known field"


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/v1/models/scripted"])
def test_unknown_query_parameters(hello: Served, strict: Served, path: str) -> None:
    plain, asked = hello.http.get(path), hello.http.get(f"{path}?api-version=1&colour=a&colour=b")
    assert warning(plain) == ""
    assert warning(asked) == '299 streamserve "unknown: api-version, colour"'
    message = "api-version is not a known query parameter"
    assert refused(strict.http.get(f"{path}?api-version=1"))["message"] == message


def test_unknown_query_parameters_of_a_request_with_a_body(hello: Served, strict: Served) -> None:
    asked = hello.http.post(f"{CHATS}?api-version=1", json={**BODIES[CHATS], "colour": 1})
    assert warning(asked) == '299 streamserve "unknown: api-version, colour"'
    messages = {"messages": [USER], "max_tokens": 1}
    for server in (hello, strict):
        assert warning(server.http.post("/v1/messages?beta=true", json=messages)) == ""


@pytest.mark.parametrize("path", ["/v1/router", "/v1/streams/x"])
def test_routes_of_this_server_alone_refuse_unknown_query_parameters(hello: Served, path: str) -> None:
    refusal = refused(hello.http.get(f"{path}?modle=x"))
    assert (refusal["param"], "modle is not a known query parameter" in refusal["message"]) == ("modle", True)


@pytest.mark.parametrize(
    ("route", "name", "meant"),
    [
        (CHATS, "temprature", "temperature"),
        (CHATS, "Max_Tokens", "max_tokens"),
        (CHATS, "stop_tokens_ids", "stop_token_ids"),
        (COMPLETIONS, "presencePenalty", "presence_penalty"),
        (RESPONSES, "max_output_token", "max_output_tokens"),
        ("/tokenize", "add_special_token", "add_special_tokens"),
    ],
)
def test_unknown_fields_that_resemble_known_ones(
    hello: Served, strict: Served, route: str, name: str, meant: str
) -> None:
    body = {**BODIES[route], name: 1, "mood": 1}
    expected = f'299 streamserve "unknown: {name} (did you mean {meant}?), mood"'
    assert warning(hello.post(route, **body)) == expected
    message = f"{name} is not a known field: did you mean {meant}?"
    assert refused(strict.post(route, **body))["message"] == message


@pytest.mark.parametrize(
    ("options", "stream", "named"),
    [
        ({"include_usage": True}, False, "stream_options without stream"),
        (
            {"continuous_usage_stats": True},
            True,
            f"{CONTINUOUS} without include_usage",
        ),
        ({"include_obfuscation": True}, True, "stream_options.include_obfuscation"),
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHATS])
def test_stream_options(
    hello: Served, strict: Served, route: str, options: dict[str, bool], stream: bool, named: str
) -> None:
    body = {**BODIES[route], "stream": stream, "stream_options": options}
    assert warning(hello.post(route, **body)) == f'299 streamserve "without effect: {named}"'
    assert refused(strict.post(route, **body))["param"] == "stream_options"


@pytest.mark.parametrize("route", [CHATS, "/tokenize"])
def test_unknown_keys_of_messages_and_parts(hello: Served, strict: Served, route: str) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part], "thinking_blocks": [], "annotations": None}
    assert warning(hello.post(route, messages=[message] * 2)) == (
        '299 streamserve "unknown: messages[].thinking_blocks, messages[].content[].cache_control"'
    )
    assert refused(strict.post(route, messages=[message]))["param"] == "messages"


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        (COMPLETIONS, "tools", [{}]),
        (COMPLETIONS, "max_completion_tokens", 5),
        (COMPLETIONS, "mirostat", 2),
        (COMPLETIONS, "max_new_tokens", 2),
        (COMPLETIONS, "suffix", "x"),
        (CHATS, "functions", [{}]),
        (CHATS, "best_of", 2),
        (CHATS, "repeat_penalty", 1.1),
        (CHATS, "modalities", ["audio"]),
        (RESPONSES, "n", 2),
        (RESPONSES, "messages", [USER]),
    ],
)
def test_fields_that_would_change_the_result_are_refused(
    hello: Served, route: str, field: str, value: Any
) -> None:
    assert refused(hello.post(route, **BODIES[route], **{field: value}))["param"] == field


def test_values_that_ask_for_nothing_are_not_named(hello: Served) -> None:
    body = {"store": False, "service_tier": "auto", "tools": [], "repeat_penalty": 1, "mirostat": 0}
    assert warning(hello.post(COMPLETIONS, prompt="hi", **body)) == ""


def test_the_header_is_safe_and_bounded(hello: Served) -> None:
    """The header is valid for any names that a client chooses: with line breaks, quotes, letters of any
    alphabet, or very long."""
    names = ['a\r\nSet-Cookie: x="1"', "ü", "x" * 1000, *(f"field{number}" for number in range(40))]
    response = hello.post(COMPLETIONS, prompt="hi", **dict.fromkeys(names, 1))
    text = warning(response)
    assert "set-cookie" not in response.headers
    assert text.startswith('299 streamserve "unknown: a??Set-Cookie??x??1?, ?, ' + "x" * 64 + ", field0")
    assert text.endswith(', field12 and 27 more"')


def test_they_are_counted_and_logged(hello: Served, caplog: pytest.LogCaptureFixture) -> None:
    kinds = [("without_effect", "store"), ("unknown", "other")]

    def counts() -> list[float]:
        return [hello.metric("ignored_fields_total", kind=kind, field=field) for kind, field in kinds]

    before = counts()
    with caplog.at_level(logging.DEBUG, logger="streamserve.api.http.ignored_fields"):
        hello.post(COMPLETIONS, prompt="hi", store=True, mood="glad", weather="fine")
    assert [after - start for after, start in zip(counts(), before, strict=True)] == [1, 2]
    assert "without effect: store; unknown: mood, weather" in caplog.text
