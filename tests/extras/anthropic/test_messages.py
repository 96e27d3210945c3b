"""POST /v1/messages behaves as Anthropic's client expects, on the real engine and on a scripted one."""

import json
import re
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import anthropic
import msgspec
import pytest

from streamserve.api.generator import Item
from streamserve.api.settings import ApiSettings
from streamserve.protocol.errors import RequestError
from streamserve.protocol.keys import digest
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta, Usage
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import Script, ScriptedGenerator, Served, scripted
from tests.api.tool_calls import CALL, PARAMETERS, TEMPLATE, says
from tests.text.folders import byte_level_folder

ROUTE, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI: Any = [{"role": "user", "content": "hi"}]
TEXT: Any = [{"role": "user", "content": "the quick brown fox"}]
WEATHER: Any = {"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS}
TIME: Any = {"name": "get_time", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> ScriptedGenerator:
    """A model whose template has tools, and reasoning that can be disabled."""
    folder = byte_level_folder(tmp_path_factory.mktemp("talker"), chat_template=TEMPLATE)
    generator = ScriptedGenerator(Tokenizer.from_folder(folder))
    return generator.replaced(model=msgspec.structs.replace(generator.model, max_model_len=4096))


@pytest.fixture(scope="module")
def talking(talker: ScriptedGenerator) -> Iterator[Served]:
    with scripted(talker) as server:
        yield server


def client_of(server: Served, **options: Any) -> anthropic.Anthropic:
    options = {"api_key": "none", "max_retries": 0, **options}
    return anthropic.Anthropic(base_url=server.url, **options)


def create(server: Served, **fields: Any) -> Any:
    names = server.llm.served_names
    return client_of(server).messages.create(
        **{"model": names[0], "max_tokens": 600, "messages": HI, **fields}
    )


def events(server: Served, **fields: Any) -> list[Any]:
    """Return the events of a stream, after checking that each is sent under its own name."""
    text = server.post(ROUTE, **{"max_tokens": 600, "messages": HI, "stream": True, **fields}).text
    received = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        received.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {received[-1]['type']}"
    return received


def error_of(server: Served, status: int, route: str = ROUTE, **body: Any) -> dict[str, Any]:
    """Return the error of a refused request, after checking its shape."""
    response = server.post(route, **{"max_tokens": 8, "messages": HI, **body})
    assert response.status_code == status, response.text
    content = response.json()
    assert set(content) == {"type", "error", "request_id"}
    assert content["type"] == "error"
    assert content["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert set(content["error"]) == {"type", "message"}
    error: dict[str, Any] = content["error"]
    return error


def last_prompt(server: Served) -> str:
    ids = server.llm.submitted[-1].prompt
    return str(server.llm.tokenizer.decode(ids, skip_special_tokens=False))


def test_a_message_has_anthropics_shape(server: Served) -> None:
    """A message has Anthropic's shape, and the text of the same conversation as a chat."""
    extra = {"temperature": 0}
    message = create(server, messages=TEXT, system="Be brief.", max_tokens=8, extra_body=extra)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    chat = server.post(
        "/v1/chat/completions", messages=[{"role": "system", "content": "Be brief."}, *TEXT], max_tokens=8
    ).json()
    (block,) = message.content
    assert block.text == chat["choices"][0]["message"]["content"] != ""
    usage = message.usage
    assert usage.output_tokens == 8
    assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    assert message._request_id.startswith("req-")


def test_the_clients_stream_comes_to_the_same(server: Served) -> None:
    whole = create(server, messages=TEXT, max_tokens=24)
    fields: Any = {"model": "tiny", "messages": TEXT, "max_tokens": 24}
    with client_of(server).messages.stream(**fields) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 2
    assert "".join(texts) == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 24)
    assert (
        final.usage.input_tokens + final.usage.cache_read_input_tokens
        == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    )


async def test_the_async_client_streams_too(server: Served) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client,
        client.messages.stream(model="tiny", messages=TEXT, max_tokens=8) as stream,
    ):
        text = "".join([text async for text in stream.text_stream])
    assert text == create(server, messages=TEXT, max_tokens=8).content[0].text


def test_a_stop_sequence_is_named(server: Served) -> None:
    text = create(server, messages=TEXT, max_tokens=24).content[0].text
    message = create(server, messages=TEXT, max_tokens=24, stop_sequences=["never said", text[5:8]])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[5:8])
    assert message.content[0].text == text[: text.index(text[5:8])]


def test_the_output_ends_with_the_context(server: Served) -> None:
    """A limit beyond the context is no error: the message ends with the context, and says so."""
    prompt = [{"role": "user", "content": "word " * 790}]
    left = 4096 - server.post(COUNT, messages=prompt).json()["input_tokens"]
    assert left > 8
    message = create(server, messages=prompt, max_tokens=8_000)
    assert (message.stop_reason, message.usage.output_tokens) == ("model_context_window_exceeded", left)
    too_long = [{"role": "user", "content": "word " * 5000}]
    message = error_of(server, 400, messages=too_long)["message"]
    assert re.match(r"prompt is too long: \d+ tokens > 4095 maximum", message)


def test_the_first_event_counts_cached_tokens(server: Served) -> None:
    prompt = [{"role": "user", "content": "the first event has the cached tokens too " * 8}]
    cached = []
    for _ in range(2):
        with server.http.stream(
            "POST", ROUTE, json={"messages": prompt, "max_tokens": 2, "stream": True}
        ) as reply:
            events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: ")]
        first, last = events[0]["message"]["usage"], events[-2]["usage"]
        assert first["cache_read_input_tokens"] == last["cache_read_input_tokens"]
        assert first["input_tokens"] == last["input_tokens"]
        cached.append(first["cache_read_input_tokens"])
    assert cached[0] < cached[1]


def test_no_tokens_compute_the_prompt_only(server: Served) -> None:
    message = create(server, messages=TEXT, max_tokens=0)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)


def test_the_last_message_of_the_assistant_is_continued(talking: Served) -> None:
    create(talking, messages=[*HI, {"role": "assistant", "content": "My answer"}])
    assert last_prompt(talking).endswith("<|im_start|>assistant\nMy answer")


def test_events_come_in_the_documented_order(talker: ScriptedGenerator) -> None:
    with scripted(talker.replaced(script=says("<think>So", " what?</think>", "Yes", ".", CALL))) as server:
        received = events(server, tools=[WEATHER])
    kinds = [event["type"] for event in received]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert received[0]["message"]["usage"]["input_tokens"] > 0
    assert received[0]["message"]["content"] == []
    open_block, blocks = None, []
    for event in received[2:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
            blocks.append((event["content_block"], []))
        else:
            assert event["index"] == open_block == len(blocks) - 1
            if event["type"] == "content_block_stop":
                open_block = None
            else:
                blocks[-1][1].append(event["delta"])
    assert open_block is None
    assert [block["type"] for block, _ in blocks] == ["thinking", "text", "tool_use"]
    thought, text, call = (deltas for _, deltas in blocks)
    assert {delta["type"] for delta in thought[:-1]} == {"thinking_delta"}
    assert "".join(delta["thinking"] for delta in thought[:-1]) == "So what?"
    assert thought[-1] == {"type": "signature_delta", "signature": ""}
    assert "".join(delta["text"] for delta in text) == "Yes."
    assert {delta["type"] for delta in call} == {"input_json_delta"}
    assert json.loads("".join(delta["partial_json"] for delta in call)) == {"city": "Rome", "days": 2}
    assert blocks[2][0]["input"] == {}
    assert received[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert received[-2]["usage"]["output_tokens"] == 6


def test_thoughts_text_and_calls_are_blocks(talker: ScriptedGenerator) -> None:
    with scripted(talker.replaced(script=says("<think>Hm</think>", "I look.", CALL, CALL))) as server:
        whole = create(server, tools=[WEATHER])
        with client_of(server).messages.stream(
            model="scripted", max_tokens=600, messages=HI, tools=[WEATHER]
        ) as stream:
            final = stream.get_final_message()
        single = create(
            server, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )
        omitted = create(server, thinking={"type": "adaptive", "display": "omitted"})
    for message in (whole, final):
        thought, text, first, second = message.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "Hm", "I look.")
        assert (first.type, first.name, first.input) == (
            "tool_use",
            "get_weather",
            {"city": "Rome", "days": 2},
        )
        assert first.id != second.id
        assert message.stop_reason == "tool_use"
        assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    assert [block.type for block in single.content] == ["thinking", "text", "tool_use"]
    assert omitted.content[0].thinking == ""


def test_a_message_is_sent_back_with_the_results(talker: ScriptedGenerator) -> None:
    """A message is sent back with the results of its calls. All parts are in the prompt; the results come
    before the text that follows them."""
    with scripted(talker.replaced(script=says("<think>Hm</think>", "I look.", CALL))) as server:
        first = create(server, tools=[WEATHER])
        call = first.content[2]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "And now?"},
        ]
        history = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        create(server, messages=history, tools=[WEATHER])
        prompt = last_prompt(server)
    assert prompt.endswith(
        "<|im_start|>assistant\n<think>Hm</think>I look."
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("choice", "grammar", "rendered"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "none"}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "get_time"}, True, True),
    ],
)
def test_tool_choices(talking: Served, choice: Any, grammar: bool, rendered: bool) -> None:
    create(talking, tools=[WEATHER, TIME], tool_choice=choice)
    assert (talking.llm.submitted[-1].params.grammar is not None) == grammar
    assert ("get_weather" in last_prompt(talking)) == rendered


def test_arguments_that_are_cut_short_are_not_lost(talker: ScriptedGenerator) -> None:
    script = says('<tool_call>{"name": "get_weather", "arguments": {"city": "Ro', finish="length")
    with scripted(talker.replaced(script=script)) as server:
        message = create(server, tools=[WEATHER])
    assert message.content[0].input == {"invalid_json": '{"city": "Ro'}
    assert message.stop_reason == "max_tokens"


def test_consecutive_turns_become_one(talking: Served) -> None:
    blocks = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    create(talking, messages=[{"role": "user", "content": blocks}, {"role": "user", "content": "three"}])
    assert "<|im_start|>user\nonetwo\nthree<|im_end|>" in last_prompt(talking)


def test_system_blocks_are_one_message_without_the_billing_header(talking: Served) -> None:
    """System blocks are one message without the billing header, which differs in each request and would
    prevent prefix cache hits."""
    blocks = [
        {"type": "text", "text": f"{text}"} for text in ("x-anthropic-billing-header: cch=1;", "A", "B")
    ]
    response = talking.post(ROUTE, max_tokens=8, messages=HI, system=blocks)
    assert "system[0] as it is a header" in response.headers["warning"]
    assert last_prompt(talking).startswith("<|im_start|>system\nAB<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize(
    ("fields", "closed"),
    [
        ({}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, False),
        ({"thinking": {"type": "adaptive"}}, False),
        ({"thinking": {"type": "disabled"}}, True),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, False),
    ],
)
def test_thinking_is_turned_off_where_the_template_has_that(
    talking: Served, fields: Any, closed: bool
) -> None:
    talking.post(ROUTE, max_tokens=8, messages=HI, **fields).raise_for_status()
    assert last_prompt(talking).endswith("<think>\n\n</think>\n\n") == closed


@pytest.mark.parametrize(("effort", "closed"), [("none", True), ("low", False)])
def test_a_format_and_an_effort(talking: Served, effort: str, closed: bool) -> None:
    format = {"type": "json_schema", "schema": {"enum": ["glad"]}}
    response = talking.post(
        ROUTE, max_tokens=8, messages=HI, output_config={"format": format, "effort": effort}
    )
    assert "warning" not in response.headers
    assert last_prompt(talking).endswith("<think>\n\n</think>\n\n") == closed
    assert "glad" in talking.llm.submitted[-1].params.grammar.text


def test_tokens_are_counted_without_generating(talking: Served) -> None:
    submitted = len(talking.llm.submitted)
    fields: Any = {"messages": HI, "tools": [WEATHER], "system": "Be brief."}
    counted = client_of(talking).messages.count_tokens(model="scripted", **fields).input_tokens
    assert len(talking.llm.submitted) == submitted
    assert counted == create(talking, **fields).usage.input_tokens
    assert counted > client_of(talking).messages.count_tokens(model="scripted", messages=HI).input_tokens


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"metadata": {"user_id": "a"}}, "metadata"),
        ({"cache_control": {"type": "ephemeral"}}, "cache_control"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"service_tier": "priority"}, "service_tier"),
        (
            {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            "system[].content[].cache_control",
        ),
    ],
)
def test_fields_without_effect(hello: Served, strict: Served, fields: Any, named: str) -> None:
    response = hello.post(ROUTE, max_tokens=8, messages=HI, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["warning"] == f'299 streamserve "without effect: {named}"'
    assert error_of(strict, 400, **fields)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"service_tier": "auto"},
        {"mcp_servers": []},
        {"thinking": {"type": "disabled"}},
    ],
)
def test_fields_that_ask_for_nothing(strict: Served, fields: Any) -> None:
    assert "warning" not in strict.post(ROUTE, max_tokens=8, messages=HI, **fields).headers


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages must hold"),
        (block(type="image", source={}), "messages[0].content[0]: blocks of type 'image' are not supported"),
        (block(type="document", source={}), "blocks of type 'document' are not supported"),
        (block(type="tool_use", id="a", name="b", input={}), "blocks of type 'tool_use' are not supported"),
        (block(type="tool_result", tool_use_id="a", content=[{"type": "image"}]), "'image'"),
        (block(type="tool_result"), "tool_use_id must be a string"),
        (block(type="text"), "messages[0].content[0].text must be a string"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role must be one of user, assistant, system"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"system": [{"type": "image"}]}, "system[0]: blocks of type 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema must be a JSON schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must have"),
        ({"tools": [TIME, TIME]}, "two tools called get_time"),
        ({"tools": [TIME], "tool_choice": {"type": "tool", "name": "no"}}, "no tool called 'no'"),
        ({"tool_choice": {"type": "required"}}, "tool_choice must have a type"),
        ({"thinking": {"type": "always"}}, "thinking: type 'always' is not one of"),
        ({"output_config": {"effort": "extreme"}}, "output_config.effort must be one of"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must have the type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": 200}, "temperature"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported"),
        ({"container": "a"}, "container is not supported"),
    ],
)
def test_refusals_name_the_field(hello: Served, fields: Any, message: str) -> None:
    error = error_of(hello, 400, **fields)
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_message_without_results_of_its_calls_is_refused(talking: Served, stream: bool) -> None:
    call = {"type": "tool_use", "id": "a", "name": "get_time", "input": {}}
    history = [*HI, {"role": "assistant", "content": [call]}]
    assert "results must follow" in error_of(talking, 400, messages=history, stream=stream)["message"]


@pytest.mark.parametrize(
    ("status", "reply", "kind", "raised"),
    [
        (400, 400, "invalid_request_error", anthropic.BadRequestError),
        (413, 413, "request_too_large", anthropic.RequestTooLargeError),
        (429, 429, "rate_limit_error", anthropic.RateLimitError),
        (500, 500, "api_error", anthropic.InternalServerError),
        (503, 529, "overloaded_error", anthropic.OverloadedError),
        (504, 504, "timeout_error", anthropic.DeadlineExceededError),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_failures(
    talker: ScriptedGenerator, status: int, reply: int, kind: str, raised: Any, stream: bool
) -> None:
    with scripted(talker.replaced(script=_fails(status))) as server:
        assert error_of(server, reply, stream=stream) == {"type": kind, "message": "no"}
        with pytest.raises(raised, match="no"):
            create(server, stream=stream)


def test_a_failure_of_a_stream_that_has_begun_is_an_event(talker: ScriptedGenerator) -> None:
    with scripted(talker.replaced(script=_fails(503, "Well"))) as server:
        received = events(server)
        with pytest.raises(anthropic.APIStatusError, match="no"):
            list(create(server, stream=True))
    assert received[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": "no"}}
    assert "message_stop" not in [event["type"] for event in received]


def _fails(status: int, *pieces: str) -> Script:
    async def script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        for piece in pieces:
            yield ChoiceDelta(0, piece, (72,))
        raise RequestError("no", status=status)
        yield Usage(0, 0)

    return script


def test_keys_come_in_either_header(generator: ScriptedGenerator) -> None:
    with scripted(generator, ApiSettings(api_key=(digest("right"),))) as server:
        for options in ({"api_key": "right"}, {"api_key": None, "auth_token": "right"}):
            fields: Any = {"model": "scripted", "max_tokens": 8, "messages": HI}
            assert client_of(server, **options).messages.create(**fields).content[0].text == "hello"
        header = {"x-api-key": "right"}
        body = {"max_tokens": 8, "messages": HI}
        assert server.http.post(ROUTE, json=body, headers=header).status_code == 200
        assert error_of(server, 401)["type"] == "authentication_error"
        with pytest.raises(anthropic.AuthenticationError):
            client_of(server, api_key="wrong").messages.create(**fields)


def test_an_unknown_model_or_path_is_not_found(hello: Served) -> None:
    assert error_of(hello, 404, model="claude")["type"] == "not_found_error"
    assert error_of(hello, 404, COUNT, model="claude")["type"] == "not_found_error"
    assert "/v1/messages/batches is not supported" in error_of(hello, 404, f"{ROUTE}/batches")["message"]


@pytest.mark.parametrize(
    ("version", "known"), [("2023-06-01", True), ("2026-10-21", True), ("2031-01-01", False)]
)
def test_versions(hello: Served, version: str, known: bool) -> None:
    body = {"max_tokens": 8, "messages": HI}
    response = hello.http.post(ROUTE, json=body, headers={"anthropic-version": version})
    assert response.status_code == 200
    assert ("anthropic-version" in response.headers.get("warning", "")) != known
