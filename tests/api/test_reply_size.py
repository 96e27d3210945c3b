"""Replies that repeat their prompts in each choice are encoded in parts, within a size limit."""

import msgspec
import pytest

from streamserve.api.openai.replies import CompletionChoice, CompletionReply
from streamserve.api.openai.reply_size import MAX_REPEATED, encoded
from tests.api.conftest import CONTEXT
from tests.api.serving import Served

N = 64
WORDS = "the quick brown fox jumps over the lazy dog " * (CONTEXT // 50)
IDS = [5] * (CONTEXT - 10)


def test_a_reply_is_the_same_as_one_encoded_at_once() -> None:
    choices = [
        CompletionChoice(index=number, text=f"é{number}\n", token_ids=[number], prompt_token_ids=[1, 2])
        for number in range(3)
    ]
    reply = CompletionReply(id="a", created=1, model="m", system_fingerprint="f", choices=choices)
    assert encoded(reply) == msgspec.json.encode(reply)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("echo", {"prompt": [WORDS] * (MAX_REPEATED // (N * len(WORDS)) + 1), "echo": True}),
        ("return_token_ids", {"prompt": [IDS] * (MAX_REPEATED // (8 * N * len(IDS)) + 1)}),
    ],
)
def test_a_reply_repeats_a_bounded_part_of_its_prompts(server: Served, field: str, fields: object) -> None:
    body = {"max_tokens": 1, "n": N, field: True, **fields}  # type: ignore[dict-item]
    reply = server.post("/v1/completions", **body)
    assert reply.status_code == 400, reply.text[:300]
    assert reply.json()["error"]["param"] == field
    assert str(MAX_REPEATED) in reply.json()["error"]["message"]


def test_a_large_reply_has_the_prompt_in_each_choice(server: Served) -> None:
    reply = server.post(
        "/v1/completions", prompt=[WORDS] * 2, max_tokens=1, n=8, echo=True, return_token_ids=True
    ).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(16))
    assert all(choice["text"].startswith(WORDS) for choice in reply["choices"])
    assert len({tuple(choice["prompt_token_ids"]) for choice in reply["choices"]}) == 1
