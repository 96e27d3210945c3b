"""POST /v1/responses behaves as OpenAI's client expects, on the real engine; failures are tested on a
scripted one."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from streamserve.api.generator import Item
from streamserve.protocol.errors import RequestError
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta, Usage
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import Script, ScriptedGenerator, Served, scripted
from tests.text.folders import byte_level_folder

ROUTE = "/v1/responses"
TEXT = "the quick brown fox"


def respond(server: Served, **body: Any) -> Any:
    response = server.post(ROUTE, **{"input": TEXT, "max_output_tokens": 8, **body})
    assert response.status_code == 200, response.text
    return response.json()


def chat(server: Served, *messages: dict[str, Any]) -> str:
    """Return the reply to the same conversation as a chat."""
    reply = server.post("/v1/chat/completions", messages=messages, max_tokens=8).json()
    return str(reply["choices"][0]["message"]["content"])


def output_text(reply: Any) -> str:
    (item,) = reply["output"]
    (part,) = item["content"]
    assert (item["type"], item["role"], part["type"]) == ("message", "assistant", "output_text")
    return str(part["text"])


def events(server: Served, **body: Any) -> list[Any]:
    """Return the events of a stream, after checking that each is sent under its own name."""
    text = server.post(ROUTE, **{"input": TEXT, "max_output_tokens": 8, "stream": True, **body}).text
    received = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        received.append(event)
    assert [event["sequence_number"] for event in received] == list(range(len(received)))
    return received


def test_a_response_has_openais_shape(server: Served) -> None:
    response = server.client.responses.create(
        model="tiny", input=TEXT, instructions="Be brief.", max_output_tokens=8, metadata={"team": "a"}
    )
    assert response.id.startswith("resp_")
    assert (response.object, response.model, response.status) == ("response", "tiny", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.instructions, response.metadata) == ("Be brief.", {"team": "a"})
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT})
    assert response.output_text == chat(server, *messages) != ""
    assert response.usage is not None
    assert response.usage.output_tokens == 8
    assert response.usage.total_tokens == response.usage.input_tokens + 8


def test_a_response_that_ends_by_itself_is_completed(server: Served) -> None:
    text = output_text(respond(server, max_output_tokens=24))
    reply = respond(server, max_output_tokens=24, stop=[text[5:8]])
    assert (reply["status"], reply["incomplete_details"]) == ("completed", None)
    assert reply["output"][0]["status"] == "completed"
    assert output_text(reply) == text[: text.index(text[5:8])]
    assert reply["completed_at"] >= reply["created_at"]


def test_the_clients_own_stream_comes_to_the_same(server: Served) -> None:
    """OpenAI's client builds the same response from its stream. It returns only completed responses."""
    text = output_text(respond(server, max_output_tokens=24))
    fields: Any = {"model": "tiny", "input": TEXT, "extra_body": {"stop": [text[12:15]]}}
    with server.client.responses.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == text[: text.index(text[12:15])]
    assert len(deltas) > 2
    assert final.status == "completed"


async def test_the_async_client_streams_too(server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = await client.responses.create(model="tiny", input=TEXT, max_output_tokens=8, stream=True)
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == output_text(respond(server))


def test_a_stream_has_openais_events_in_their_order(server: Served) -> None:
    received = events(server)
    kinds = [event["type"] for event in received]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 2
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    created, item, last = received[0]["response"], received[2]["item"], received[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert (item["status"], item["content"]) == ("in_progress", [])
    assert last["output"] == [received[-2]["item"]]
    assert last["output"][0]["id"] == item["id"] == received[4]["item_id"]
    assert output_text(last) == received[-4]["text"] == "".join(event.get("delta", "") for event in received)
    assert last["usage"]["output_tokens"] == 8


def test_a_conversation_in_items(server: Served) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TEXT}]},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "jumps", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "and then?"},
    ]
    expected = chat(
        server,
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": "jumps"},
        {"role": "user", "content": "and then?"},
    )
    assert output_text(respond(server, input=items)) == expected


def test_a_response_can_be_sent_back_as_it_came(server: Served) -> None:
    """A response can be sent back unchanged, as a client continues that stores nothing on the server."""
    first = server.client.responses.create(model="tiny", input=TEXT, max_output_tokens=8)
    history: list[Any] = [
        {"role": "user", "content": TEXT},
        *first.output,
        {"role": "user", "content": "so?"},
    ]
    second = server.client.responses.create(model="tiny", input=history, max_output_tokens=8)
    assert second.output_text == chat(
        server,
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "so?"},
    )


def test_logprobs_when_they_are_included(server: Served) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    scores = respond(server, **fields)["output"][0]["content"][0]["logprobs"]
    assert len(scores) == 8
    for entry in scores:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    streamed = [score for event in events(server, **fields) for score in event.get("logprobs", [])]
    assert streamed == [*scores, *scores]  # in the deltas, and in the completed item
    assert respond(server)["output"][0]["content"][0]["logprobs"] == []


def test_cached_tokens_are_told(server: Served) -> None:
    fields = {"input": "a text that was never asked about before " * 3, "max_output_tokens": 1}
    first, second = (respond(server, **fields)["usage"] for _ in range(2))
    assert second["input_tokens_details"]["cached_tokens"] >= 32
    assert first["input_tokens_details"]["cached_tokens"] < second["input_tokens_details"]["cached_tokens"]


def test_a_form_of_the_text_is_followed(server: Served) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]}
    response_format = {
        "type": "json_schema",
        "name": "number",
        "schema": {**schema, "additionalProperties": False},
    }
    reply = respond(server, text={"format": response_format}, max_output_tokens=64)
    assert reply["status"] == "completed"
    assert json.loads(output_text(reply))["n"] in (1, 2, 3)


def test_sampling_fields_are_obeyed(server: Served, tokenizer: Tokenizer) -> None:
    token = tokenizer.encode("x")[0]
    reply = respond(server, allowed_token_ids=[token], temperature=1.0, top_p=0.5, seed=3)
    assert output_text(reply) == "x" * 8
    assert (reply["temperature"], reply["top_p"]) == (1.0, 0.5)
    same = {"temperature": 1.0, "seed": 5}
    assert output_text(respond(server, **same)) == output_text(respond(server, **same))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": None}, "input", "input is required"),
        ({"input": []}, "input", "at least one item"),
        ({"input": 5}, "input", "expected `str | array`"),
        ({"input": ["hi"]}, "input", "expected `object`"),
        ({"input": [{"role": "user"}]}, "input", "input[0].content must be a string or a list of parts"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "references are not supported"),
        (
            {"input": [{"role": "user", "content": "a"}, {"type": "compaction", "encrypted_content": "x"}]},
            "input",
            "input[1]: only the server that compacted a conversation can read its compaction: send the",
        ),
        ({"input": [{"type": "compaction_trigger"}]}, "input", "input[0]: this server does not compact"),
        ({"input": [{"type": "computer_call"}]}, "input", "type 'computer_call' are not supported"),
        ({"input": [{"role": "user", "content": "a", "mood": "glad"}]}, "input", "input[0].mood"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "parts of type 'input_image'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "mood": "glad"}]}]},
            "input",
            "mood of a part is not a known field",
        ),
        ({"text": {"format": {"type": "json_object", "lax": True}}}, "text", "lax is not a known field"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input", "encrypted_content"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input", "input[0].name must be a string"),
        ({"input": "x" * 10_000}, "input", "prompt is too long: at least"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning", "reasoning.effort must be one of none, minimal"),
        ({"reasoning": {"effort": 5}}, "reasoning", "reasoning.effort must be one of none, minimal"),
        ({"conversation": "conv_1"}, "conversation", "is not supported"),
        ({"background": True}, "background", "is not supported"),
        ({"truncation": "auto"}, "truncation", 'leave it out, or set it to "disabled"'),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[web_search] has no effect"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "type 'file_search'"),
        ({"text": {"format": {"type": "xml"}}}, "text", "text.format must have a type"),
        ({"mood": "glad"}, "mood", "mood is not a known field"),
        ({"text": {"verbosity": "low"}}, "text", "text.verbosity is not supported"),
        ({"include": ["file_search_call.results"]}, "include", "file_search_call.results"),
        ({"top_logprobs": 2}, "top_logprobs", "needs"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
        ({"max_tokens": 5}, "max_tokens", "max_tokens is not supported (use max_output_tokens)"),
        ({"n": 2}, "n", "n is not supported: leave it out"),
        ({"temperature": 101}, "temperature", "between 0 and 100"),
    ],
)
def test_what_is_refused(strict: Served, fields: dict[str, Any], param: str, message: str) -> None:
    response = strict.post(ROUTE, **{"input": "hi", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


THINKING_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{% if message.reasoning_content %}<think>{{ message.reasoning_content }}"
    "</think>{% endif %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
)
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CALLS = (
    "<think>\nSunny?\n</think>\n\nLet me see. "
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call>'
)


def _writes(text: str, finish: Any = "stop") -> Script:
    """Return a model that generates `text`, two characters a token."""

    async def script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        for start in range(0, len(text), 2):
            yield ChoiceDelta(0, text[start : start + 2], (72,))
        yield ChoiceDelta(0, finish=finish)
        yield Usage(len(prompt), (len(text) + 1) // 2)

    return script


@pytest.fixture
def thinker(generator: ScriptedGenerator, tmp_path: Path) -> ScriptedGenerator:
    """A model with a long context whose template renders tools and reasoning."""
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path, chat_template=THINKING_TEMPLATE))
    model = msgspec.structs.replace(generator.model, max_model_len=4096)
    return generator.replaced(tokenizer=tokenizer, model=model, submitted=[], script=_writes(CALLS))


def test_thoughts_text_and_calls_are_items(thinker: ScriptedGenerator) -> None:
    with scripted(thinker) as server:
        response = server.client.responses.create(model="scripted", input=TEXT, tools=[WEATHER])
        streamed = events(server, tools=[WEATHER])
    thought, message, first, second = response.output
    assert (thought.type, message.type, first.type, second.type) == (
        "reasoning",
        "message",
        "function_call",
        "function_call",
    )
    assert thought.content is not None
    assert thought.content[0].text == "Sunny?"
    assert response.output_text.strip() == "Let me see."
    assert [json.loads(call.arguments) for call in (first, second)] == [{"place": "Ulm"}, {"place": "Bonn"}]
    assert (first.name, second.name, first.status) == ("weather", "weather", "completed")
    assert len({first.id, second.id, first.call_id, second.call_id}) == 4
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens / 2
    added = [event["item"]["type"] for event in streamed if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    assert added == ["reasoning", "message", "function_call", "function_call"]
    assert done == streamed[-1]["response"]["output"]
    for place, item in enumerate(done[2:], start=2):
        pieces = [
            event["delta"]
            for event in streamed
            if event["type"] == "response.function_call_arguments.delta" and event["output_index"] == place
        ]
        assert "".join(pieces) == item["arguments"]
        assert len(pieces) > 1


def test_calls_and_their_outputs_go_back_to_the_model(thinker: ScriptedGenerator) -> None:
    """Calls and their outputs go back to the model: the output items are sent again, with the results of the
    functions."""
    with scripted(thinker) as server:
        output = server.client.responses.create(model="scripted", input=TEXT, tools=[WEATHER]).output
        answers = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
            for item in output
            if item.type == "function_call"
        ]
        history: Any = [{"role": "user", "content": TEXT}, *output, *answers]
        server.client.responses.create(model="scripted", input=history, tools=[WEATHER])
    prompt = thinker.tokenizer.decode(thinker.submitted[-1].prompt, skip_special_tokens=False)
    call = '<tool_call>{"name": "weather", "arguments": {"place": "%s"}}</tool_call>'
    tools, conversation = prompt.split("\n", 1)
    assert json.loads(tools)["function"]["name"] == "weather"
    assert conversation == (
        f"<|im_start|>user\n{TEXT}<|im_end|>\n"
        f"<|im_start|>assistant\n<think>Sunny?</think>Let me see.{call % 'Ulm'}{call % 'Bonn'}<|im_end|>\n"
        "<|im_start|>tool\nsun<|im_end|>\n<|im_start|>tool\nsun<|im_end|>\n"
    )


def test_a_prompt_that_was_cut_still_opens_the_thought(
    thinker: ScriptedGenerator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A truncated prompt still opens the reasoning: the end of the template's text decides whether the model
    begins with it."""
    template = THINKING_TEMPLATE + "<|im_start|>assistant\n<think>\n"
    folder = byte_level_folder(tmp_path_factory.mktemp("opens"), chat_template=template)
    tokenizer = Tokenizer.from_folder(folder)
    with scripted(thinker.replaced(tokenizer=tokenizer, script=_writes("hm\n</think>\nhello"))) as server:
        output = server.post(ROUTE, input=TEXT, truncate_prompt_tokens=12).json()["output"]
    assert len(thinker.submitted[-1].prompt) == 12
    assert [item["content"][0]["text"] for item in output] == ["hm", "hello"]


def test_only_calls_make_no_message(thinker: ScriptedGenerator) -> None:
    text = CALLS[CALLS.index("<tool_call>") :]
    with scripted(thinker.replaced(script=_writes(text))) as server:
        output = server.post(ROUTE, input=TEXT, tools=[WEATHER]).json()["output"]
    assert [item["type"] for item in output] == ["function_call", "function_call"]


def test_a_response_cut_short_says_in_which_item(thinker: ScriptedGenerator) -> None:
    with scripted(thinker.replaced(script=_writes("<think>hm, well", "length"))) as server:
        reply = server.post(ROUTE, input=TEXT).json()
    assert (reply["status"], reply["output"][0]["status"]) == ("incomplete", "incomplete")
    assert [item["type"] for item in reply["output"]] == ["reasoning"]


def test_a_form_of_the_text_reaches_the_engine(thinker: ScriptedGenerator) -> None:
    schema = {"type": "object", "properties": {"place": {"type": "string"}}}
    response_format = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    with scripted(thinker.replaced(script=_writes('{"place": "Ulm"}'))) as server:
        reply = server.post(ROUTE, input=TEXT, text={"format": response_format})
        assert reply.status_code == 200, reply.text
        assert reply.json()["text"] == {"format": response_format}
        wrong = server.post(ROUTE, input=TEXT, text={"format": {**response_format, "schema": 5}}).json()[
            "error"
        ]
    grammar = thinker.submitted[-1].params.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schema
    assert (wrong["param"], wrong["message"]) == ("text", "text.format must be an object with a schema")


async def _breaks(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
    yield ChoiceDelta(0, "hel", (72,))
    raise RequestError("the worker died", status=500)


def test_a_response_that_fails_on_its_way_says_so(generator: ScriptedGenerator) -> None:
    with scripted(generator.replaced(script=_breaks)) as server:
        last = events(server)[-1]
        assert server.post(ROUTE, input=TEXT).status_code == 500
    assert last["type"] == "response.failed"
    assert output_text(last["response"]) == "hel"
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the worker died"}


async def _says_nothing(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
    yield ChoiceDelta(0, finish="stop")


def test_an_output_of_nothing_is_an_empty_message(generator: ScriptedGenerator) -> None:
    with scripted(generator.replaced(script=_says_nothing)) as server:
        assert output_text(server.post(ROUTE, input=TEXT).json()) == ""


def test_more_scores_than_a_reply_may_hold(generator: ScriptedGenerator) -> None:
    """More log-probabilities than one reply may hold are refused, also in a stream, whose last event has all
    of them."""
    wide = generator.replaced(model=msgspec.structs.replace(generator.model, max_model_len=1 << 20))
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    with scripted(wide) as server:
        for stream in (False, True):
            response = server.post(ROUTE, input=TEXT, stream=stream, **body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == "top_logprobs"
            assert "is the limit" in error["message"]
