"""Limits by the context's length: outputs are limited with a warning, and long prompts are refused with a
message that clients recognize."""

import json
import re
from typing import Any

import pytest

from tests.api.serving import ScriptedGenerator, Served

CONTEXT = 64
PROMPT = "abcdefgh"
LONG = "x" * 70
MESSAGES = [{"role": "user", "content": PROMPT}]
LONG_MESSAGES = [{"role": "user", "content": LONG}]
ROUTES = {
    "/v1/completions": ({"prompt": PROMPT}, {"prompt": LONG}, "max_tokens", "prompt"),
    "/v1/chat/completions": ({"messages": MESSAGES}, {"messages": LONG_MESSAGES}, "max_tokens", "messages"),
    "/v1/responses": ({"input": PROMPT}, {"input": LONG}, "max_output_tokens", "input"),
    "/v1/messages": ({"messages": MESSAGES}, {"messages": LONG_MESSAGES}, "max_tokens", None),
}
EVERY = [(route, *fields) for route, fields in ROUTES.items()]


@pytest.mark.parametrize(("route", "short", "long", "limit", "param"), EVERY)
@pytest.mark.parametrize("stream", [False, True])
def test_an_output_longer_than_the_context_is_limited_with_a_warning(
    hello: Served,
    generator: ScriptedGenerator,
    route: str,
    short: Any,
    long: Any,
    limit: str,
    param: Any,
    stream: bool,
) -> None:
    response = hello.post(route, **short, **{limit: 32_000}, stream=stream)
    assert response.status_code == 200, response.text
    submitted = generator.submitted[-1]
    left = CONTEXT - len(submitted.prompt)
    assert submitted.params.max_tokens == left
    assert response.headers["warning"] == f'299 streamserve "limited: {limit} to {left}"'
    exact = hello.post(route, **short, **{limit: left}, stream=stream)
    assert (exact.status_code, "warning" in exact.headers) == (200, False)


def limited(name: str, value: Any) -> dict[str, Any]:
    return {"options": {name: value}} if name == "num_predict" else {name: value}


LIMITS = [
    *((route, short, limit) for route, short, _, limit, _ in EVERY),
    ("/v1/chat/completions", {"messages": MESSAGES}, "max_completion_tokens"),
    ("/api/chat", {"messages": MESSAGES}, "num_predict"),
    ("/api/generate", {"prompt": PROMPT}, "num_predict"),
]


@pytest.mark.parametrize(("route", "short", "limit"), LIMITS)
def test_every_integer_beyond_the_context_is_limited(
    hello: Served, generator: ScriptedGenerator, route: str, short: Any, limit: str
) -> None:
    for value in (2**31, 2**31 + 1, 2**63, 2**64, 10**300, 1e300):
        response = hello.post(route, **short, **limited(limit, value))
        assert response.status_code == 200, response.text
        submitted = generator.submitted[-1]
        left = CONTEXT - len(submitted.prompt)
        assert submitted.params.max_tokens == left > 0
        assert f"limited: {limit} to {left}" in response.headers["warning"]


@pytest.mark.parametrize(("route", "short", "limit"), LIMITS)
@pytest.mark.parametrize("value", ["5", True, [5], {}, 5.5])
def test_a_limit_that_is_not_an_integer_is_refused(
    hello: Served, generator: ScriptedGenerator, route: str, short: Any, limit: str, value: Any
) -> None:
    before = len(generator.submitted)
    response = hello.post(route, **short, **limited(limit, value))
    assert response.status_code == 400, response.text
    assert limit in response.text
    assert len(generator.submitted) == before


def test_the_newer_name_of_the_limit_is_named(hello: Served) -> None:
    labels = {"kind": "limited", "field": "max_completion_tokens"}
    before = hello.metric("ignored_fields_total", **labels)
    response = hello.post("/v1/chat/completions", messages=MESSAGES, max_completion_tokens=999)
    assert "limited: max_completion_tokens to" in response.headers["warning"]
    assert hello.metric("ignored_fields_total", **labels) == before + 1


@pytest.mark.parametrize(("route", "short", "long", "limit", "param"), EVERY)
def test_strict_fields_are_not_limited(
    strict: Served, route: str, short: Any, long: Any, limit: str, param: Any
) -> None:
    response = strict.post(route, **short, **{limit: 32_000})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(f"{limit} must be at most ")
    assert error.get("param") == (None if param is None else limit)


@pytest.mark.parametrize(("route", "short", "long", "limit", "param"), EVERY)
def test_a_prompt_that_is_too_long_is_recognized_by_clients(
    hello: Served, route: str, short: Any, long: Any, limit: str, param: str | None
) -> None:
    """The error has OpenAI's code and the phrase that agents search for, with the number of tokens and the
    maximum."""
    response = hello.post(route, **long, **{limit: 5})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error.get("code") == (None if param is None else "context_length_exceeded")
    assert error.get("param") == param
    numbers = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
    assert numbers
    assert int(numbers[1]) >= 70
    assert int(numbers[2]) == CONTEXT - 1
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("count", [10_000])
def test_a_text_that_is_not_tokenized_is_recognized_too(hello: Served, route: str, count: int) -> None:
    text = "x" * count
    fields: Any = {"prompt": text} if route.endswith("/v1/completions") else {}
    fields = fields or {"messages": [{"role": "user", "content": text}]}
    error = hello.post(route, **fields).json()["error"]
    assert error["code"] == "context_length_exceeded"
    longest = hello.llm.tokenizer.longest_token
    tokens = re.match(r"prompt is too long: at least (\d+) tokens > 64 maximum", error["message"])
    assert tokens
    assert int(tokens[1]) >= count // longest


def test_a_streamed_response_fails_with_the_code_as_an_event(hello: Served) -> None:
    """The error is sent as an event, because Codex shortens the conversation only then."""
    response = hello.post("/v1/responses", input=LONG, stream=True)
    assert response.status_code == 200
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "context_length_exceeded")
    assert failed["error"]["message"].startswith("prompt is too long: ")


def test_more_min_tokens_than_the_context_has_are_refused(hello: Served) -> None:
    for fields in ({"max_tokens": 100, "min_tokens": 60}, {"min_tokens": 16}):
        prompt = PROMPT if "max_tokens" in fields else "y" * 60
        response = hello.post("/v1/completions", prompt=prompt, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "min_tokens"), response.text


def test_a_truncated_prompt_and_the_output_must_fit_together(hello: Served) -> None:
    fields = {"truncate_prompt_tokens": -1, "max_tokens": 32_000}
    error = hello.post("/v1/completions", prompt=LONG, **fields).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"
