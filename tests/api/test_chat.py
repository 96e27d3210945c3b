"""POST /v1/chat/completions behaves as OpenAI's clients expect, with the real engine."""

import json
from typing import Any

import openai
import pytest

from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import Served

CHAT: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the quick brown fox"},
]
PROMPT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nthe quick brown fox<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def chat(server: Served, **body: Any) -> Any:
    response = server.post("/v1/chat/completions", **{"messages": CHAT, "max_tokens": 8, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_reply_has_openais_shape(server: Served, tokenizer: Tokenizer) -> None:
    reply = server.client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8)
    assert reply.id.startswith("chatcmpl-")
    assert (reply.object, reply.model) == ("chat.completion", "tiny")
    choice = reply.choices[0]
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    assert choice.message.refusal is None
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(tokenizer.encode(PROMPT, add_special_tokens=False))


def test_the_prompt_is_what_the_template_renders(server: Served) -> None:
    reply = chat(server)["choices"][0]["message"]["content"]
    same = server.post("/v1/completions", prompt=PROMPT, max_tokens=8, add_special_tokens=False)
    assert reply == same.json()["choices"][0]["text"]


def test_a_stream_begins_with_the_role_and_has_the_same_text(server: Served) -> None:
    pieces = list(
        server.client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8, stream=True)
    )
    deltas = [piece.choices[0].delta for piece in pieces]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert (
        "".join(delta.content or "" for delta in deltas) == chat(server)["choices"][0]["message"]["content"]
    )
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"
    assert {piece.object for piece in pieces} == {"chat.completion.chunk"}


async def test_the_async_client_streams_too(server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="owner/tiny", messages=CHAT, max_completion_tokens=8, stream=True
        )
        text = "".join([piece.choices[0].delta.content or "" async for piece in stream])
        whole = await client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8)
    assert text == whole.choices[0].message.content


def test_a_raw_stream_ends_with_done(server: Served) -> None:
    body = {"messages": CHAT, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    *blocks, done, rest = server.post("/v1/chat/completions", **body).text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    *pieces, last = [json.loads(block.removeprefix("data: ")) for block in blocks]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    assert all(piece["usage"] is None for piece in pieces)


def test_without_a_limit_a_reply_fills_the_context(server: Served, tokenizer: Tokenizer) -> None:
    remaining = 6
    head = len(tokenizer.encode(PROMPT.replace("the quick brown fox", ""), add_special_tokens=False))
    content = "\0" * (server.llm.model.max_model_len - remaining - head)
    messages = [CHAT[0], {"role": "user", "content": content}]
    usage = chat(server, messages=messages, max_tokens=None)["usage"]
    assert usage["completion_tokens"] == remaining


def test_n_replies(server: Served) -> None:
    reply = chat(server, n=3, temperature=1.0, seed=3)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in reply["choices"]}) == 3
    assert reply["usage"]["completion_tokens"] == 24


def test_logprobs_in_openais_shape(server: Served) -> None:
    reply = server.client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=6, logprobs=True, top_logprobs=2
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    written = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert written.decode(errors="replace") == reply.choices[0].message.content
    for entry in logprobs.content:
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 2
    bare = chat(server, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in bare)
    assert chat(server)["choices"][0]["logprobs"] is None


def test_streamed_logprobs_are_the_same(server: Served) -> None:
    fields = {"max_tokens": 6, "logprobs": True, "top_logprobs": 1}
    whole = chat(server, **fields)["choices"][0]["logprobs"]["content"]
    stream = server.client.chat.completions.create(model="tiny", messages=CHAT, stream=True, **fields)  # type: ignore[call-overload]
    pieces = [entry for event in stream for entry in event.choices[0].logprobs.content]
    assert [entry.token for entry in pieces] == [entry["token"] for entry in whole]


def test_a_stop_string_ends_the_reply(server: Served) -> None:
    text = chat(server, max_tokens=24)["choices"][0]["message"]["content"]
    choice = chat(server, max_tokens=24, stop=[text[5:8]])["choices"][0]
    assert choice["message"]["content"] == text[: text.index(text[5:8])]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", text[5:8])


def test_a_final_message_can_be_continued(server: Served) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "a request has"}]
    reply = chat(server, messages=messages, continue_final_message=True, add_generation_prompt=False)
    same = server.post(
        "/v1/completions", prompt=PROMPT + "a request has", max_tokens=8, add_special_tokens=False
    )
    assert reply["choices"][0]["message"]["content"] == same.json()["choices"][0]["text"]


def test_the_generation_prompt_can_be_left_out(server: Served, tokenizer: Tokenizer) -> None:
    bare = PROMPT.removesuffix("<|im_start|>assistant\n")
    usage = chat(server, add_generation_prompt=False)["usage"]
    assert usage["prompt_tokens"] == len(tokenizer.encode(bare, add_special_tokens=False))


def test_content_may_come_in_parts(server: Served) -> None:
    parts = [{"type": "text", "text": "the quick"}, {"type": "text", "text": " brown fox"}]
    in_parts = chat(server, messages=[{"role": "user", "content": parts}])
    whole = chat(server, messages=[{"role": "user", "content": "the quick brown fox"}])
    assert in_parts["choices"][0]["message"] == whole["choices"][0]["message"]


def test_a_reply_can_be_sent_back_as_it_came(server: Served) -> None:
    reply = server.client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=4)
    messages = [*CHAT, reply.choices[0].message.model_dump(), {"role": "user", "content": "and then"}]
    assert chat(server, messages=messages)["choices"][0]["message"]["content"]


def test_token_ids_and_prompt_logprobs_when_asked_for(server: Served, tokenizer: Tokenizer) -> None:
    reply = chat(server, return_token_ids=True, prompt_logprobs=1)
    ids = tokenizer.encode(PROMPT, add_special_tokens=False)
    assert reply["prompt_token_ids"] == ids
    assert tokenizer.decode(reply["choices"][0]["token_ids"]) == reply["choices"][0]["message"]["content"]
    assert len(reply["prompt_logprobs"]) == len(ids)


def test_a_stream_has_the_prompts_token_ids_in_its_first_event(server: Served, tokenizer: Tokenizer) -> None:
    body = {"messages": CHAT, "max_tokens": 3, "stream": True, "return_token_ids": True, "n": 2}
    lines = server.post("/v1/chat/completions", **body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    ids = tokenizer.encode(PROMPT, add_special_tokens=False)
    firsts = [event for event in events if "role" in event["choices"][0]["delta"]]
    assert [event["prompt_token_ids"] for event in firsts] == [ids] * 2
    assert sum("prompt_token_ids" in event for event in events) == 2


def test_fields_that_were_not_requested_are_null_as_in_vllm(server: Served) -> None:
    reply = chat(server)
    assert {reply[name] for name in ("prompt_logprobs", "prompt_token_ids", "service_tier")} == {None}
    assert reply["choices"][0]["token_ids"] is None
    message = reply["choices"][0]["message"]
    nulls = ("reasoning", "reasoning_content", "refusal", "annotations", "audio", "function_call")
    assert {message[name] for name in nulls} == {None}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"]},
        {"response_format": {"type": "text"}, "functions": None, "audio": None},
        {"max_tokens": 8, "max_completion_tokens": 8, "user": "someone", "store": False},
    ],
)
def test_fields_that_ask_nothing_of_the_output(server: Served, fields: dict[str, Any]) -> None:
    assert chat(server, **fields)["choices"][0]["message"] == chat(server)["choices"][0]["message"]
