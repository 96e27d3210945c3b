"""POST /api/chat and /api/generate send the right request to the engine, and the right reply to clients."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.api.generator import Item
from streamserve.api.settings import ApiSettings
from streamserve.protocol.errors import RequestError
from streamserve.protocol.keys import digest
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta, TokenLogprob, TopToken, Usage
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import ScriptedGenerator, Served, scripted, until
from tests.api.tool_calls import CALL, WEATHER, says
from tests.extras.ollama.asking import CHAT, GENERATE, HI, ask, last_prompt, lines, refusal, talker
from tests.text.folders import byte_level_folder

ANSWER = f"<think>Let me see.</think>The weather: {CALL}"
CALLED = {"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}
COUNTS = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}


class Pieces:
    """A script whose pieces can be replaced."""

    def __init__(self) -> None:
        self.now: list[str] = ["hello"]

    def __call__(self, prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        return says(*self.now)(prompt, params)


@pytest.fixture(scope="module")
def pieces() -> Pieces:
    return Pieces()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, pieces: Pieces) -> Iterator[Served]:
    with scripted(talker(tmp_path_factory.mktemp("talker"), pieces)) as running:
        yield running


@pytest.fixture(autouse=True)
def says_hello(pieces: Pieces) -> None:
    pieces.now = ["hello"]


def test_a_chat_is_streamed_by_default(server: Served) -> None:
    first, last = lines(server, CHAT, model="small", messages=HI)
    assert (first["model"], first["done"]) == ("small", False)
    assert first["message"] == {"role": "assistant", "content": "hello"}
    assert COUNTS.isdisjoint(first)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert set(last) >= COUNTS
    assert last["eval_count"] == 2
    assert last["prompt_eval_count"] == len(server.llm.submitted[-1].prompt)


def test_a_whole_chat(server: Served) -> None:
    reply = ask(server, CHAT, model="small", messages=HI)
    assert reply["message"] == {"role": "assistant", "content": "hello"}
    assert reply["done"] is True
    assert reply["total_duration"] >= reply["prompt_eval_duration"] + reply["eval_duration"] > 0
    assert reply["created_at"].endswith("Z")


def test_the_prompt_is_the_chat_routes(server: Served) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    ask(server, CHAT, messages=messages, tools=[WEATHER])
    server.post("/v1/chat/completions", messages=messages, tools=[WEATHER])
    ollama, openai = server.llm.submitted[-2:]
    assert ollama.prompt == openai.prompt
    assert "get_weather" in last_prompt(server)


@settings(max_examples=30, deadline=None)
@given(cuts=st.sets(st.integers(1, len(ANSWER) - 1), max_size=12))
def test_a_stream_comes_to_the_whole_reply(server: Served, pieces: Pieces, cuts: set[int]) -> None:
    """A stream adds up to the whole reply, however the text is cut into pieces. A call is in one line."""
    places = [0, *sorted(cuts), len(ANSWER)]
    pieces.now = [ANSWER[begin:end] for begin, end in pairwise(places)]
    whole = ask(server, CHAT, messages=HI, tools=[WEATHER])["message"]
    parts = [line["message"] for line in lines(server, CHAT, messages=HI, tools=[WEATHER])]
    joined = {name: "".join(part.get(name, "") for part in parts) for name in ("content", "thinking")}
    assert joined == {"content": whole["content"], "thinking": whole["thinking"]}
    assert (joined["thinking"], joined["content"].strip()) == ("Let me see.", "The weather:")
    (streamed,) = [call for part in parts for call in part.get("tool_calls", [])]
    (call,) = whole["tool_calls"]
    assert streamed["function"] == call["function"] == {"index": 0, **CALLED}
    assert call["id"]


def test_a_reply_is_a_valid_request(server: Served, pieces: Pieces) -> None:
    """A reply is a valid request, even if its call is incomplete."""
    for text in (ANSWER, ANSWER[: ANSWER.index("2}")]):
        pieces.now = [text]
        message = ask(server, CHAT, messages=HI, tools=[WEATHER])["message"]
        result = {"role": "tool", "tool_name": "get_weather", "content": "sunny"}
        ask(server, CHAT, messages=[*HI, message, result], tools=[WEATHER])
        assert "Let me see." in last_prompt(server)
        assert "sunny" in last_prompt(server)
    assert '"arguments": {"city": "Rome", "days": null}' in last_prompt(server)


def test_half_of_a_surrogate_pair_is_replaced(server: Served, pieces: Pieces) -> None:
    pieces.now = [CALL.replace("Rome", "\\ud800")]
    (call,) = ask(server, CHAT, messages=HI, tools=[WEATHER])["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"city": "\ufffd", "days": 2}


def test_several_calls_have_their_own_lines(server: Served, pieces: Pieces) -> None:
    pieces.now = [CALL, CALL.replace("Rome", "Paris")]
    calls = [
        line["message"].get("tool_calls", []) for line in lines(server, CHAT, messages=HI, tools=[WEATHER])
    ]
    cities = [[call["function"]["arguments"]["city"] for call in line] for line in calls if line]
    assert cities == [["Rome"], ["Paris"]]
    assert [call["function"]["index"] for line in calls for call in line] == [0, 1]


@pytest.mark.parametrize(
    ("think", "closed"), [(None, False), (True, False), (False, True), ("low", False), ("none", True)]
)
def test_think_is_the_templates_variable(server: Served, think: Any, closed: bool) -> None:
    reply = server.post(CHAT, messages=HI, think=think, stream=False)
    assert last_prompt(server).endswith("</think>\n\n") == closed
    assert "warning" not in reply.headers


def test_a_think_that_is_no_effort_is_refused(server: Served) -> None:
    assert refusal(server, CHAT, messages=HI, think="hard").startswith("think must be one of none, minimal")


def test_a_last_message_of_the_assistant_is_continued(server: Served) -> None:
    ask(server, CHAT, messages=[*HI, {"role": "assistant", "content": "The answer"}])
    assert last_prompt(server).endswith("The answer")


def test_a_format_is_a_grammar(server: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for route, body in ((CHAT, {"messages": HI}), (GENERATE, {"prompt": "hi"})):
        for format, expected in (("json", {"type": "object"}), (schema, schema), ("", None)):
            ask(server, route, **body, format=format)
            grammar = server.llm.submitted[-1].params.grammar
            assert (grammar and json.loads(grammar.text)) == expected
    assert "format must be json or a JSON schema" in refusal(server, CHAT, messages=HI, format="xml")


def test_generate_answers_a_prompt(server: Served) -> None:
    reply = ask(server, GENERATE, prompt="Why?", system="Be brief.")
    assert (reply["response"], reply["done_reason"]) == ("hello", "stop")
    prompt = last_prompt(server)
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>" in prompt
    first, last = lines(server, GENERATE, prompt="Why?")
    assert (first["response"], last["response"], last["done"]) == ("hello", "", True)


def test_a_raw_prompt_is_continued_as_it_is(server: Served, pieces: Pieces) -> None:
    """A raw prompt is continued unchanged. Its reasoning is part of the text, unless `think` asks for it."""
    pieces.now = ["<think>hm</think>yes"]
    reply = ask(server, GENERATE, prompt="Once upon", raw=True)
    assert (reply["response"], "thinking" in reply) == ("<think>hm</think>yes", False)
    assert server.llm.submitted[-1].prompt == server.llm.tokenizer.encode("Once upon")
    reply = ask(server, GENERATE, prompt="Once upon", raw=True, think=True)
    assert (reply["response"], reply["thinking"]) == ("yes", "hm")
    assert "system has no place in a raw prompt" in refusal(
        server, GENERATE, prompt="x", raw=True, system="y"
    )


def test_a_model_without_a_template_continues_prompts(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path_factory.mktemp("base"), chat_template=None))
    with scripted(ScriptedGenerator(tokenizer)) as base:
        assert ask(base, GENERATE, prompt="Once upon")["response"] == "hello"
        assert base.llm.submitted[-1].prompt == tokenizer.encode("Once upon")
        for route, body in ((CHAT, {"messages": HI}), (GENERATE, {"prompt": "x", "system": "y"})):
            assert "no chat template" in refusal(base, route, **body)


@pytest.mark.parametrize(("route", "field"), [(CHAT, "message"), (GENERATE, "response")])
def test_without_a_prompt_the_model_is_only_loaded(server: Served, route: str, field: str) -> None:
    before = len(server.llm.submitted)
    reply = server.post(route, model="small").json()
    assert (reply["done"], reply["done_reason"]) == (True, "load")
    assert reply["total_duration"] >= reply["load_duration"] >= 0
    assert field in reply
    assert len(server.llm.submitted) == before
    for keep_alive in (0, "0", "0s"):
        message = refusal(server, route, model="small", keep_alive=keep_alive)
        assert message.startswith("keep_alive: 0 asks to unload the model")


def test_the_default_tag_is_taken(server: Served) -> None:
    assert ask(server, CHAT, model="small:latest", messages=HI)["model"] == "small:latest"
    assert "The model 'small:8b' does not exist" in refusal(server, CHAT, 404, model="small:8b", messages=HI)


def test_the_output_ends_with_the_context(server: Served) -> None:
    ask(server, CHAT, messages=HI, options={"num_predict": 100_000})
    submitted = server.llm.submitted[-1]
    assert submitted.params.max_tokens == 4096 - len(submitted.prompt)


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "messages[0].images is"),
        (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role must be one of system"),
        (CHAT, {"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content must be a string"),
        (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0]"),
        (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": 1}]}, "messages[1].tool_calls must be"),
        (CHAT, {"messages": HI, "tools": [{"type": "x"}]}, "tools[0] must have the type function"),
        (CHAT, {"messages": HI, "temperature": 0}, "temperature is not supported (use options.temperature)"),
        (CHAT, {"messages": HI, "max_tokens": 5}, "max_tokens is not supported (use options.num_predict)"),
        (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs needs logprobs"),
        (GENERATE, {"prompt": "a", "images": ["x"]}, "images is not supported"),
        (GENERATE, {"prompt": "a", "suffix": "b"}, "suffix is not supported (use raw, with"),
        (GENERATE, {"prompt": "a", "template": "b"}, "template is not supported (use raw"),
        (GENERATE, {"prompt": "a", "context": [1]}, "context is not supported (use /api/chat with messages)"),
        (GENERATE, {"prompt": "a", "width": 64}, "width is not supported"),
        (GENERATE, {"prompt": 5}, "prompt: expected `str`, got `int`"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(server: Served, route: str, body: dict[str, Any], message: str) -> None:
    assert refusal(server, route, **body).startswith(message)


def test_a_last_message_with_calls_needs_their_results(server: Served) -> None:
    calls = [{"function": CALLED}]
    messages = [*HI, {"role": "assistant", "content": "", "tool_calls": calls}]
    assert "so their results must follow it" in refusal(server, CHAT, messages=messages)


def test_fields_without_effect_are_named(server: Served) -> None:
    message = {"role": "user", "content": "hi", "mood": "glad", "images": []}
    options = {"num_ctx": 8192, "numa": False, "temprature": 0}
    reply = server.post(CHAT, messages=[message], keep_alive="5m", options=options, stream=False)
    warning = reply.headers["warning"]
    for text in ("keep_alive", "num_ctx", "messages[].mood", "temprature (did you mean temperature?)"):
        assert text in warning
    assert "numa" not in warning
    assert "images" not in warning


def test_log_probabilities(tmp_path_factory: pytest.TempPathFactory) -> None:
    async def script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        top = (TopToken(72, b"h", -0.5), TopToken(73, b"i", -1.5))
        yield ChoiceDelta(0, "h", (72,), (TokenLogprob(72, b"h", -0.5, 0, top[: params.logprobs]),))
        yield ChoiceDelta(0, tokens=(3,), finish="stop")
        yield Usage(len(prompt), 2)

    with scripted(talker(tmp_path_factory.mktemp("scored"), script)) as server:
        for body, top in (({}, []), ({"top_logprobs": 2}, ["h", "i"])):
            reply = ask(server, CHAT, messages=HI, logprobs=True, **body)
            (entry,) = reply["logprobs"]
            assert (entry["token"], entry["logprob"], entry["bytes"]) == ("h", -0.5, [104])
            assert [each["token"] for each in entry["top_logprobs"]] == top
            first, *_ = lines(server, GENERATE, prompt="hi", logprobs=True, **body)
            assert first["logprobs"] == reply["logprobs"]
        assert "logprobs" not in ask(server, CHAT, messages=HI)


def failing(error: Exception, begun: bool) -> Callable[..., AsyncGenerator[Item, None]]:
    """Return a script that fails at once, or after it has `begun`."""

    async def script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        if begun:
            yield ChoiceDelta(0, "hel", (72,))
        raise error

    return script


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("stream", [False, True])
def test_overload_says_when_to_try_again(
    tmp_path_factory: pytest.TempPathFactory, status: int, stream: bool
) -> None:
    error = RequestError("busy", status=status, retry_after=2.5)
    with scripted(talker(tmp_path_factory.mktemp("busy"), failing(error, begun=False))) as server:
        response = server.post(CHAT, messages=HI, stream=stream)
    assert (response.status_code, response.json()) == (status, {"error": "busy"})
    assert response.headers["retry-after"] == "3"
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req-")


def test_an_error_in_a_stream_is_its_last_line(tmp_path_factory: pytest.TempPathFactory) -> None:
    for error, message in (
        (RequestError("lost", status=503), "lost"),
        (ValueError("a secret"), "the server failed to handle this request"),
    ):
        with scripted(talker(tmp_path_factory.mktemp("lost"), failing(error, begun=True))) as server:
            first, last = lines(server, CHAT, messages=HI)
        assert first["message"]["content"] == "hel"
        assert last == {"error": message}


def test_keys_and_limits_are_the_servers(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = ApiSettings(api_key=[digest("secret")], max_body_bytes=200)
    with scripted(talker(tmp_path_factory.mktemp("closed"), says("hello")), settings) as server:
        for path in (CHAT, "/api/tags"):
            method = "POST" if path == CHAT else "GET"
            response = server.http.request(method, path, json={"messages": HI} if path == CHAT else None)
            assert response.status_code == 401
            assert response.json()["error"].startswith("a key is required")
        headers = {"Authorization": "Bearer secret"}
        assert server.http.post(CHAT, json={"messages": HI}, headers=headers).status_code == 200
        large = {"messages": [{"role": "user", "content": "a" * 300}]}
        response = server.http.post(CHAT, json=large, headers=headers)
        assert (response.status_code, set(response.json())) == (413, {"error"})


def test_a_client_that_leaves_cancels_its_request(tmp_path_factory: pytest.TempPathFactory) -> None:
    cancelled: list[bool] = []

    async def script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        try:
            while True:
                yield ChoiceDelta(0, "la ", (72,))
                await asyncio.sleep(0.01)
        finally:
            cancelled.append(True)

    with scripted(talker(tmp_path_factory.mktemp("singer"), script)) as server:
        with server.http.stream("POST", CHAT, json={"messages": HI}) as response:
            assert json.loads(next(response.iter_lines()))["message"]["content"] == "la "
        until(lambda: bool(cancelled))


def test_headers_of_the_other_routes_are_obeyed(server: Served) -> None:
    headers = {"x-slo-tpot-ms": "40", "idempotency-key": "a"}
    seeds = []
    for _ in range(2):
        server.http.post(CHAT, json={"messages": HI, "stream": False}, headers=headers).raise_for_status()
        params = server.llm.submitted[-1].params
        assert params.slo is not None
        assert params.slo.tpot_ms == 40
        seeds.append(params.seed)
    assert seeds[0] == seeds[1] is not None
