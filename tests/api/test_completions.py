"""POST /v1/completions behaves as OpenAI's client and vLLM's users expect, with the real engine."""

from typing import Any

import pytest

from streamserve.text.tokenizer import Tokenizer
from tests.api.completing import PROMPT, complete, events
from tests.api.serving import Served


def test_a_completion_has_openais_shape(server: Served, tokenizer: Tokenizer) -> None:
    reply = server.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8)
    assert reply.id.startswith("cmpl-")
    assert (reply.object, reply.model) == ("text_completion", "tiny")
    assert reply.system_fingerprint == server.llm.model.system_fingerprint
    assert (reply.choices[0].index, reply.choices[0].finish_reason) == (0, "length")
    assert reply.choices[0].text
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (8, reply.usage.prompt_tokens + 8)


def test_every_reply_has_an_id_of_its_own(server: Served) -> None:
    ids = {server.post("/v1/completions", prompt=PROMPT, max_tokens=1).json()["id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(id.startswith("cmpl-") for id in ids)


def test_sixteen_tokens_unless_told_otherwise(server: Served) -> None:
    assert len(complete(server, return_token_ids=True)["token_ids"]) == 16


def test_the_default_length_shrinks_to_what_the_context_holds(server: Served) -> None:
    remaining = 5
    prompt = [65] * (server.llm.model.max_model_len - remaining)
    assert len(complete(server, prompt=prompt, return_token_ids=True)["token_ids"]) == remaining


def test_a_stream_has_the_same_text(server: Served) -> None:
    whole = complete(server, max_tokens=24)["text"]
    pieces = list(server.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"
    assert {piece.id for piece in pieces} == {pieces[0].id}
    assert len(pieces) > 5


async def test_a_stream_through_the_async_client(server: Served) -> None:
    import openai

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, stream=True)
        text = "".join([piece.choices[0].text async for piece in stream])
    assert text == complete(server, max_tokens=8)["text"]


def test_every_event_is_one_line_of_data(server: Served) -> None:
    response = server.post("/v1/completions", prompt=PROMPT, max_tokens=4, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    blocks = response.text.split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    assert blocks[-2:] == ["data: [DONE]", ""]


def test_a_prompt_is_text_or_token_ids_one_or_many(server: Served, tokenizer: Tokenizer) -> None:
    other = "a request has"
    texts = [complete(server, prompt=prompt, max_tokens=6)["text"] for prompt in (PROMPT, other)]
    ids = [tokenizer.encode(PROMPT), tokenizer.encode(other)]
    assert complete(server, prompt=ids[0], max_tokens=6)["text"] == texts[0]
    for prompts in ([PROMPT, other], ids):
        reply = server.post("/v1/completions", prompt=prompts, max_tokens=6).json()
        assert [choice["text"] for choice in reply["choices"]] == texts
        assert [choice["index"] for choice in reply["choices"]] == [0, 1]
        assert reply["usage"]["completion_tokens"] == 12
        assert reply["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])


def test_n_choices_of_every_prompt(server: Served) -> None:
    fields = {"prompt": ["one", "two"], "n": 2, "max_tokens": 4, "temperature": 1.0, "seed": 5}
    reply = server.post("/v1/completions", **fields).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in reply["choices"]]
    assert len(set(texts)) == 4
    streamed = [""] * 4
    for event in events(server, **fields):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts


@pytest.mark.parametrize("stream", [False, True])
def test_more_choices_than_run_at_once_are_refused_by_name(server: Served, stream: bool) -> None:
    response = server.post("/v1/completions", prompt="one", n=65, max_tokens=1, stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "n")
    assert error["message"] == "n is 65, but at most 64 sequences run at once"


def test_the_same_seed_gives_the_same_text(server: Served) -> None:
    def text(seed: int) -> str:
        return str(complete(server, max_tokens=12, temperature=1.0, seed=seed)["text"])

    assert text(7) == text(7) != text(8)
    assert text(-1) == text(-1) == text(2**64 - 1)
    assert text(-(2**63)) == text(2**63)


def test_logit_bias_is_obeyed(server: Served, tokenizer: Tokenizer) -> None:
    token = tokenizer.encode("x")[0]
    assert complete(server, max_tokens=5, logit_bias={str(token): 100})["text"] == "xxxxx"


def test_a_stop_string_ends_the_text(server: Served) -> None:
    text = complete(server, max_tokens=24)["text"]
    stop = text[6:9]
    choice = complete(server, max_tokens=24, stop=stop)
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    kept = complete(server, max_tokens=24, stop=["\0\0", stop], include_stop_str_in_output=True)
    assert kept["text"] == text[: text.index(stop)] + stop
    streamed = events(server, max_tokens=24, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]


def test_a_stop_token_ends_the_text(server: Served) -> None:
    ids = complete(server, max_tokens=12, return_token_ids=True)["token_ids"]
    stop = ids[4]
    choice = complete(server, max_tokens=12, stop_token_ids=[stop], return_token_ids=True)
    assert choice["token_ids"] == ids[: ids.index(stop) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_echo_puts_the_prompt_before_the_text(server: Served, tokenizer: Tokenizer) -> None:
    text = complete(server, max_tokens=6)["text"]
    assert complete(server, max_tokens=6, echo=True)["text"] == PROMPT + text
    assert complete(server, prompt=tokenizer.encode(PROMPT), max_tokens=6, echo=True)["text"] == PROMPT + text
    streamed = events(server, max_tokens=6, echo=True)
    assert "".join(event["choices"][0]["text"] for event in streamed) == PROMPT + text


def test_echo_without_new_tokens_scores_a_text(server: Served, tokenizer: Tokenizer) -> None:
    choice = complete(server, max_tokens=0, echo=True, logprobs=2)
    scores = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert scores["tokens"] == [tokenizer.token_text(token) for token in tokenizer.encode(PROMPT)]
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert all(value <= 0 for value in scores["token_logprobs"][1:])
    assert scores["text_offset"][0] == 0
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert PROMPT.startswith(token, offset)
    for token, value, top in zip(
        *(scores[key][1:] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert top[token] == value
        assert 2 <= len(top) <= 3


def test_scores_of_a_prompt_are_those_it_had_as_output(server: Served, tokenizer: Tokenizer) -> None:
    written = complete(server, max_tokens=8, logprobs=1, return_token_ids=True)
    whole = tokenizer.encode(PROMPT) + written["token_ids"]
    scores = complete(server, prompt=whole, max_tokens=0, echo=True, logprobs=1)["logprobs"]["token_logprobs"]
    assert scores[-8:] == pytest.approx(written["logprobs"]["token_logprobs"], abs=1e-3)


def test_logprobs_of_the_output(server: Served) -> None:
    choice = complete(server, max_tokens=8, logprobs=3, logit_bias={"70": 1.5})
    scores = choice["logprobs"]
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["text_offset"]) == 8
    for value, top in zip(scores["token_logprobs"], scores["top_logprobs"], strict=True):
        assert 3 <= len(top) <= 4
        assert value in top.values()
    streamed = [
        event["choices"][0]["logprobs"]
        for event in events(server, max_tokens=8, logprobs=3, logit_bias={"70": 1.5})
    ]
    assert [token for piece in streamed for token in piece["tokens"]] == scores["tokens"]
    assert [place for piece in streamed for place in piece["text_offset"]] == scores["text_offset"]


def test_echoed_logprobs_go_on_into_the_output(server: Served, tokenizer: Tokenizer) -> None:
    fields = {"max_tokens": 4, "echo": True, "logprobs": 0}
    scores = complete(server, **fields)["logprobs"]
    count = len(tokenizer.encode(PROMPT))
    assert len(scores["tokens"]) == count + 4
    assert scores["text_offset"][count] == len(PROMPT)
    pieces = [event["choices"][0]["logprobs"] for event in events(server, **fields)]
    assert [token for piece in pieces for token in piece["tokens"]] == scores["tokens"]


def test_prompt_logprobs_by_token_id(server: Served, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    table = complete(server, max_tokens=1, prompt_logprobs=2)["prompt_logprobs"]
    assert len(table) == len(ids)
    assert table[0] is None
    for token, entry in zip(ids[1:], table[1:], strict=True):
        assert entry[str(token)]["decoded_token"] == tokenizer.token_text(token)
        assert {1, 2} <= {one["rank"] for one in entry.values()}


def test_token_ids_when_asked_for(server: Served, tokenizer: Tokenizer) -> None:
    choice = complete(server, max_tokens=5, return_token_ids=True)
    assert choice["prompt_token_ids"] == tokenizer.encode(PROMPT)
    assert tokenizer.decode(choice["token_ids"]) == choice["text"]
    streamed = [event["choices"][0] for event in events(server, max_tokens=5, return_token_ids=True)]
    assert [token for piece in streamed for token in piece["token_ids"]] == choice["token_ids"]
    assert streamed[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert streamed[1]["prompt_token_ids"] is None


def test_fields_that_were_not_requested_are_null_as_in_vllm(server: Served) -> None:
    reply = server.post("/v1/completions", prompt=PROMPT, max_tokens=1).json()
    assert reply["service_tier"] is None
    choice = reply["choices"][0]
    assert {choice[name] for name in ("prompt_logprobs", "token_ids", "prompt_token_ids")} == {None}


def test_usage_at_the_end_of_a_stream(server: Served, tokenizer: Tokenizer) -> None:
    *pieces, last = events(server, max_tokens=5, stream_options={"include_usage": True})
    assert all(piece["usage"] is None for piece in pieces)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert last["usage"]["prompt_tokens"] == len(tokenizer.encode(PROMPT))
    assert "usage" not in events(server, max_tokens=2)[0]


def test_usage_in_every_event_of_a_stream(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [event["usage"] for event in events(server, max_tokens=5, stream_options=options)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 5)
    alone = events(server, max_tokens=2, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in event for event in alone)  # As in vLLM, this option needs include_usage.


def test_cached_tokens_are_told(server: Served) -> None:
    prompt = list(range(100, 164))
    first, second = (server.post("/v1/completions", prompt=prompt, max_tokens=1).json() for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    salted = server.post("/v1/completions", prompt=prompt, max_tokens=1, cache_salt="other").json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "someone", "metadata": {"team": "a"}, "store": False, "safety_identifier": "s"},
        {"temperature": None, "logprobs": None, "suffix": None, "stop": None},
        {"suffix": "", "best_of": 1, "n": 1, "response_format": {"type": "text"}, "service_tier": "auto"},
        {"priority": -3, "min_p": 0.0, "top_k": -1, "repetition_penalty": 1.0, "min_tokens": 1},
    ],
)
def test_fields_that_ask_nothing_of_the_output(server: Served, fields: dict[str, Any]) -> None:
    assert complete(server, max_tokens=6, **fields)["text"] == complete(server, max_tokens=6)["text"]
