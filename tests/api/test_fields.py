"""vLLM's request fields, on the real engine."""

import codecs
from typing import Any

import pytest

from streamserve.text.tokenizer import Tokenizer
from tests.api.completing import PROMPT, complete, events
from tests.api.serving import Served

CHATS = "/v1/chat/completions"
USER = {"role": "user", "content": PROMPT}


def cached(server: Served, route: str, **body: Any) -> int:
    """Return the number of cached tokens in the last event of a stream."""
    body |= {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 1}
    *_, last, _, _ = server.post(route, **body).text.split("\n\n")
    told = last.partition('"cached_tokens":')[2].split("}")[0]
    return int(told)


def test_only_the_last_tokens_of_a_prompt(server: Served, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    for prompt in (PROMPT, ids):
        choice = complete(server, prompt=prompt, truncate_prompt_tokens=3, return_token_ids=True)
        assert choice["prompt_token_ids"] == ids[-3:]
        assert choice["text"] == complete(server, prompt=ids[-3:])["text"]
    whole = complete(server, truncate_prompt_tokens=len(ids) + 5, return_token_ids=True)
    assert whole["prompt_token_ids"] == ids
    chat = server.post(
        CHATS, messages=[USER], max_tokens=1, truncate_prompt_tokens=4, return_token_ids=True
    ).json()
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"] == 4


def test_a_prompt_that_is_too_long_is_truncated_to_fit(server: Served) -> None:
    context = server.llm.model.max_model_len
    prompt = [65 + place % 10 for place in range(context + 20)]
    reply = server.post("/v1/completions", prompt=prompt, max_tokens=5, truncate_prompt_tokens=-1).json()
    assert reply["usage"]["prompt_tokens"] == context - 5
    assert reply["usage"]["completion_tokens"] == 5


def test_an_echo_of_a_truncated_prompt(server: Served, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    choice = complete(server, max_tokens=2, truncate_prompt_tokens=3, echo=True, logprobs=0)
    assert choice["text"].startswith(tokenizer.decode(ids[-3:]))
    assert choice["logprobs"]["tokens"][:3] == [tokenizer.token_text(token) for token in ids[-3:]]
    assert choice["logprobs"]["text_offset"][0] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_generated(server: Served, temperature: float) -> None:
    free = complete(server, max_tokens=24, temperature=temperature, seed=2, return_token_ids=True)
    allowed = [70, 80, 90]
    held = complete(
        server,
        max_tokens=24,
        temperature=temperature,
        seed=2,
        allowed_token_ids=allowed,
        return_token_ids=True,
    )
    assert not set(free["token_ids"]) <= set(allowed)
    assert set(held["token_ids"]) <= set(allowed)
    assert len(set(held["token_ids"])) > 1 or temperature == 0.0


def test_allowed_tokens_that_all_end_the_text(server: Served) -> None:
    response = server.post(
        "/v1/completions", prompt=PROMPT, allowed_token_ids=[70], stop_token_ids=[70], min_tokens=2
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "allowed_token_ids")


def test_tokens_by_their_ids(server: Served, tokenizer: Tokenizer) -> None:
    fields = {"max_tokens": 4, "logprobs": 2, "echo": True, "return_token_ids": True}
    named = complete(server, **fields, return_tokens_as_token_ids=True)
    ids = [f"token_id:{token}" for token in tokenizer.encode(PROMPT) + named["token_ids"]]
    assert named["logprobs"]["tokens"] == ids
    assert all(
        top is None or name in top for name, top in zip(ids, named["logprobs"]["top_logprobs"], strict=True)
    )
    plain = complete(server, **fields)["logprobs"]
    assert named["logprobs"]["token_logprobs"] == plain["token_logprobs"]
    assert named["logprobs"]["text_offset"] == plain["text_offset"]
    body = {"messages": [USER], "max_tokens": 3, "logprobs": True, "return_tokens_as_token_ids": True}
    choice = server.post(CHATS, **body, return_token_ids=True).json()["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]


def test_text_offsets_count_characters_not_bytes(server: Served, tokenizer: Tokenizer) -> None:
    """Tokens that are parts of one character have its offset; the next token's offset is one character
    further."""
    text = "é日🙂z"
    ids = [token for character in text for token in tokenizer.encode(character, False)]
    assert len(ids) > len(text)
    scores = complete(server, prompt=ids, max_tokens=0, echo=True, logprobs=0)["logprobs"]
    expected, seen = [], b""
    for token in ids:
        expected.append(len(seen.decode(errors="ignore")))
        seen += tokenizer.token_bytes(token)
    assert scores["text_offset"] == expected
    assert expected[-1] == len(text) - 1


def test_text_offsets_of_an_output_of_several_bytes_a_character(server: Served, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é", False)
    assert len(ids) == 2
    bias = {str(token): 100 for token in ids}
    choice = complete(
        server, max_tokens=12, temperature=1.0, seed=1, logit_bias=bias, logprobs=0, return_token_ids=True
    )
    assert set(choice["token_ids"]) == set(ids)
    assert "é" in choice["text"]
    reader, seen, expected = codecs.getincrementaldecoder("utf-8")("replace"), "", []
    for token in choice["token_ids"]:
        expected.append(len(seen))
        seen += reader.decode(tokenizer.token_bytes(token))
    assert choice["logprobs"]["text_offset"] == expected
    assert len(set(expected)) < len(expected)


@pytest.mark.parametrize("route", ["/v1/completions", CHATS])
def test_cached_tokens_in_a_stream(server: Served, route: str) -> None:
    text = f"a text of {route} that no request has had before, long enough for two blocks"
    body: dict[str, Any] = (
        {"messages": [{"role": "user", "content": text}]} if route == CHATS else {"prompt": text}
    )
    first, second = cached(server, route, **body), cached(server, route, **body)
    assert first < 16
    assert second >= 32


def test_prompt_logprobs_in_both_routes(server: Served, tokenizer: Tokenizer) -> None:
    chat = server.post(CHATS, messages=[USER], max_tokens=1, prompt_logprobs=1, return_token_ids=True).json()
    ids = chat["prompt_token_ids"]
    table = complete(server, prompt=ids, max_tokens=1, prompt_logprobs=1)["prompt_logprobs"]
    assert chat["prompt_logprobs"] == table
    for token, entry in zip(ids[1:], table[1:], strict=True):
        assert {one["rank"] for one in entry.values()} >= {1}
        assert entry[str(token)]["decoded_token"] == tokenizer.token_text(token)


def test_all_tokens_of_a_stream_are_scored_once(server: Served) -> None:
    whole = complete(server, max_tokens=8, logprobs=1)["logprobs"]
    pieces = [event["choices"][0]["logprobs"] for event in events(server, max_tokens=8, logprobs=1)]
    assert [offset for piece in pieces for offset in piece["text_offset"]] == whole["text_offset"]
