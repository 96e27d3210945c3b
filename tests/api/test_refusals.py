"""A refused request gets a message that names the field at fault. Strict servers refuse every field without
effect."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from streamserve.api.settings import ApiSettings
from streamserve.text.tokenizer import Tokenizer
from tests.api.refusing import CHATS, COMPLETIONS, USER, refused
from tests.api.serving import ScriptedGenerator, Served, scripted, until
from tests.text.folders import byte_level_folder

HUGE = 10**300


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": None}, "prompt", "prompt is required"),
        ({"prompt": []}, "prompt", "prompt must be all texts"),
        ({"prompt": ["a", 1]}, "prompt", "prompt must be all texts"),
        ({"prompt": [[]]}, "prompt", "empty list"),
        ({"prompt": {"text": "a"}}, "prompt", "expected `str | array`"),
        ({"prompt": [1, 2.5]}, "prompt", "got `float`"),
        ({"prompt": [1, True]}, "prompt", "got `bool`"),
        ({"prompt": [5000]}, "prompt", "prompt has token 5000, but the vocabulary has 320 tokens"),
        ({"prompt": [[-1]]}, "prompt", "prompt has token -1"),
        ({"prompt": [HUGE]}, "prompt", "but the vocabulary has 320 tokens"),
        ({"prompt": "x" * 10_000}, "prompt", "maximum context length is 64 tokens"),
        ({"best_of": 3}, "best_of", "best_of is not supported, unless it equals n"),
        ({"suffix": "end"}, "suffix", "suffix is not supported"),
        ({"logprobs": True}, "logprobs", "got `bool`"),
        ({"logprobs": 1000}, "logprobs", "logprobs must be between 0 and 64"),
        ({"echo": 1}, "echo", "expected `bool`"),
    ],
)
def test_of_completions(strict: Served, fields: dict[str, Any], param: str, message: str) -> None:
    body = {"prompt": "hi", **fields}
    error = refused(strict.post(COMPLETIONS, **body))
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": None}, "messages", "messages is required"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hi"}, "messages", "expected `array`"),
        ({"messages": ["hi"]}, "messages", "expected `object`"),
        ({"messages": [{"content": "hi"}]}, "messages", "messages[0].role must be one of system, developer"),
        ({"messages": [{"role": "usr", "content": "hi"}]}, "messages", "messages[0].role must be one of"),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0].content is required"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages", "messages[0].tool_calls is not supported"),
        ({"messages": [{**USER, "mood": "glad"}]}, "messages", "messages[0].mood is not a known field"),
        ({"messages": [{**USER, "prefix": True}]}, "messages", "messages[0].prefix is not supported"),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": "a", "mood": "glad"}]}]},
            "messages",
            "mood of a part is not a known field",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "functions is not supported (use tools)"),
        ({"function_call": {"name": "f"}}, "function_call", "is not supported (use tool_choice)"),
        ({"messages": [{**USER, "role": "critic"}]}, "messages", "role must be one of system, developer"),
        ({"prompt": "a"}, "prompt", "prompt is not supported: leave it out"),
        ({"messages": [{**USER, "name": 5}]}, "messages", "messages[0].name must be a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages",
            "parts of type 'input_audio' are not supported",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0] must have the type function, and a function"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice is required, but there are no tools"),
        ({"functions": [{}]}, "functions", "functions is not supported"),
        ({"response_format": {"type": "xml"}}, "response_format", "response_format.type must be text"),
        ({"modalities": ["audio"]}, "modalities", "modalities is not supported"),
        ({"audio": {"voice": "a"}}, "audio", "audio is not supported"),
        ({"store": True}, "store", "store is not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs"),
        ({"logprobs": 2}, "logprobs", "expected `bool`"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "top_logprobs must be between 0 and 64"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens must be between"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens", "differ"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt set to false"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "may not set tools"),
        (
            {"messages": [{**USER, "content": "x" * 10_000}]},
            "messages",
            "maximum context length is 64 tokens",
        ),
    ],
)
def test_of_chats(strict: Served, fields: dict[str, Any], param: str, message: str) -> None:
    error = refused(strict.post(CHATS, **{"messages": [USER], **fields}))
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize("route", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 0, "n must be between 1 and 128"),
        ("n", True, "n: expected `int | null`, got `bool`"),
        ("n", 1.5, "got `float`"),
        ("n", "1", "got `str`"),
        ("n", HUGE, "n is out of range"),
        ("temperature", -0.1, "temperature must be between 0 and 100"),
        ("temperature", "hot", "expected `float | null`"),
        ("temperature", HUGE, "out of range"),
        ("top_p", 0, "top_p must be above 0"),
        ("top_p", 1.5, "top_p must be between 0 and 1"),
        ("top_k", -2, "top_k must be between -1"),
        ("min_p", 2, "min_p must be between 0 and 1"),
        ("presence_penalty", 3, "presence_penalty must be between -2 and 2"),
        ("repetition_penalty", 0, "repetition_penalty must be between 0.01"),
        ("logit_bias", {"x": 1}, "logit_bias: 'x' is not a token id"),
        ("logit_bias", {"-1": 1}, "logit_bias: '-1' is not a token id"),
        ("logit_bias", {"5000": 1}, "logit_bias contains 5000"),
        ("logit_bias", {"5": 101}, "must be between -100 and 100"),
        ("logit_bias", {"5": True}, "expected `float`"),
        ("seed", 2**64, "seed is out of range"),
        ("seed", -(2**63) - 1, "seed is out of range"),
        ("seed", 1.5, "got `float`"),
        ("max_tokens", True, "got `bool`"),
        ("max_tokens", HUGE, "max_tokens must be at most"),
        ("min_tokens", -1, "min_tokens must be between 0"),
        ("stop", "", "stop strings must have 1 to"),
        ("stop", ["a", None], "expected `str`, got `null`"),
        ("stop", ["a"] * 65, "stop may contain at most 64"),
        ("stop_token_ids", [320], "stop_token_ids contains 320"),
        ("stream", "yes", "expected `bool`"),
        ("stream_options", {"include_usage": True}, "stream_options needs stream"),
        ("prompt_logprobs", 65, "prompt_logprobs must be between 0 and 64"),
        ("priority", HUGE, "priority is out of range"),
        ("metadata", {"a": 1}, "expected `str`"),
        ("guided_json", "{", "guided_json is not JSON"),
        ("use_beam_search", True, "use_beam_search is not supported"),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens must be -1 or between 1 and"),
        ("truncate_prompt_tokens", 65, "the context of 64, got 65"),
        ("allowed_token_ids", [], "allowed_token_ids must hold at least one token"),
        ("allowed_token_ids", [5, 320], "allowed_token_ids contains 320, but the vocabulary has 320 tokens"),
        ("allowed_token_ids", [5] * 16385, "allowed_token_ids may contain at most 16384"),
        ("cache_salt", "", "cache_salt must not be empty"),
        ("temprature", 1, "temprature is not a known field"),
        ("temprature", None, "temprature is not a known field"),
    ],
)
def test_of_both(strict: Served, route: str, field: str, value: Any, message: str) -> None:
    required = {"prompt": "hi"} if route == COMPLETIONS else {"messages": [USER]}
    error = refused(strict.post(route, **required, **{field: value}))
    assert error["param"] == field
    assert message in error["message"]


def test_unknown_stream_options(hello: Served) -> None:
    body = {"prompt": "hi", "stream": True, "stream_options": {"include_costs": True}}
    error = refused(hello.post(COMPLETIONS, **body))
    assert (error["param"], "include_costs" in error["message"]) == ("stream_options", True)


def test_prompt_logprobs_in_a_stream(hello: Served) -> None:
    error = refused(hello.post(COMPLETIONS, prompt="hi", stream=True, prompt_logprobs=1))
    assert error["param"] == "prompt_logprobs"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": Infinity}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "out of range"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "out of range"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "\\ud800 x"}', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_bodies_that_are_no_request(hello: Served, body: bytes, message: str) -> None:
    response = hello.http.post(COMPLETIONS, content=body)
    assert message in refused(response)["message"]


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_that_are_too_large(generator: ScriptedGenerator, declared: bool) -> None:
    body = json.dumps({"prompt": "x" * 200_000}).encode()
    with scripted(generator, ApiSettings(max_body_bytes=100_000)) as server:
        content = body if declared else (body[at : at + 1000] for at in range(0, len(body), 1000))
        error = refused(server.http.post(COMPLETIONS, content=content), 413)
        assert "larger than 100000 bytes" in error["message"]
        assert server.post(COMPLETIONS, prompt="x").status_code == 200


def test_more_prompts_than_the_limit(generator: ScriptedGenerator) -> None:
    with scripted(generator, ApiSettings(max_requests=2)) as server:
        assert server.post(COMPLETIONS, prompt=["a", "b"]).status_code == 200
        assert "at most 2" in refused(server.post(COMPLETIONS, prompt=["a", "b", "c"]))["message"]


def test_models_that_are_not_served(hello: Served) -> None:
    message = "The model 'gpt-4' does not exist; this server has: scripted, owner/scripted"
    for route, body in ((COMPLETIONS, {"prompt": "hi"}), (CHATS, {"messages": [USER]})):
        error = refused(hello.post(route, model="gpt-4", **body), 404)
        assert (error["message"], error["param"], error["code"]) == (message, "model", "model_not_found")
    assert refused(hello.http.get("/v1/models/gpt-4"), 404)["message"] == message
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        hello.client.completions.create(model="gpt-4", prompt="hi")


def test_routes_that_do_not_exist(hello: Served) -> None:
    assert refused(hello.http.get("/v1/nothing"), 404)["message"] == "there is no route GET /v1/nothing"
    message = "there is no route POST /v1/completions/: use /v1/completions"
    assert refused(hello.post("/v1/completions/"), 404)["message"] == message


def test_methods_a_route_does_not_take(hello: Served) -> None:
    response = hello.http.get(COMPLETIONS)
    assert refused(response, 405)["message"] == "/v1/completions does not take GET"
    assert response.headers["allow"] == "POST"


def test_a_model_without_chat_template(generator: ScriptedGenerator, tmp_path: Path) -> None:
    bare = Tokenizer.from_folder(byte_level_folder(tmp_path, chat_template=None))
    with scripted(generator.replaced(tokenizer=bare)) as server:
        assert "/v1/completions" in refused(server.post(CHATS, messages=[USER]))["message"]
        assert server.post(COMPLETIONS, prompt="hi").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses(server: Served, stream: bool) -> None:
    """Requests are refused before anything is sent, so a stream has the right status too."""
    limit = server.llm.model.max_model_len
    error = refused(server.post(COMPLETIONS, prompt=[65] * (limit + 1), max_tokens=1, stream=stream))
    assert (error["param"], f"{limit + 1} tokens" in error["message"]) == ("prompt", True)
    error = refused(server.post(COMPLETIONS, prompt=["a", "b"], n=129, stream=stream))
    assert error["param"] == "n"


def test_one_refused_prompt_refuses_them_all(server: Served) -> None:
    """If one prompt of a request is too long, the whole request is refused, although the other prompts would
    fit."""
    prompts = [[65] * 4, [65] * server.llm.model.max_model_len, [65] * 4]
    error = refused(server.post(COMPLETIONS, prompt=prompts, max_tokens=3000))
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    until(lambda: server.active_sequences() == 0)
