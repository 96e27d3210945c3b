"""A choice's tokens are converted to deltas: text, log-probabilities and the finish reason."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.messages import FinishReason, LikelyToken, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.message import MessageParser
from streamserve.text.output import ChoiceDelta, ChoiceText
from streamserve.text.reasoning import REASONING_FORMATS, ReasoningParser
from streamserve.text.reply_events import MergedEvents, ReasoningDelta, TextDelta
from streamserve.text.tokenizer import Tokenizer
from streamserve.text.tools.formats import FORMATS
from streamserve.text.tools.parser import ToolCallParser

TEXT = "the quick brown 🙃 fox"


def events(ids: list[int], finish: FinishReason | None = None, logprobs: bool = False) -> list[Token]:
    last = len(ids) - 1
    top = [LikelyToken(5, -0.5), LikelyToken(6, -1.5)] if logprobs else None
    return [
        Token("r", 0, 0, i, token, -0.5 if logprobs else None, top, finish if i == last else None)
        for i, token in enumerate(ids)
    ]


def feed(choice: ChoiceText, tokens: list[Token]) -> list[ChoiceDelta]:
    deltas = [choice.feed(token) for token in tokens]
    return [delta for delta in deltas if delta is not None]


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**settings)


@given(ids=st.lists(st.integers(0, 345), min_size=1), skip=st.booleans())
def test_deltas_together_are_the_decoded_whole(
    bpe: Tokenizer, spm: Tokenizer, ids: list[int], skip: bool
) -> None:
    for tokenizer in (bpe, spm):
        deltas = feed(ChoiceText(tokenizer, params(skip_special_tokens=skip)), events(ids, "length"))
        assert "".join(delta.text for delta in deltas) == tokenizer.decode(ids, skip_special_tokens=skip)
        assert [token for delta in deltas for token in delta.tokens] == ids
        assert [delta.finish for delta in deltas] == [None] * (len(ids) - 1) + ["length"]


def test_the_token_that_stops_is_counted_but_not_text(bpe: Tokenizer) -> None:
    ids = [*bpe.encode(TEXT, add_special_tokens=False), 20]
    deltas = feed(ChoiceText(bpe, params()), events(ids, "stop"))
    assert "".join(delta.text for delta in deltas) == TEXT
    assert deltas[-1] == ChoiceDelta(0, tokens=(20,), finish="stop")


def test_a_stop_token_of_the_request_is_named(bpe: Tokenizer) -> None:
    deltas = feed(ChoiceText(bpe, params(stop_token_ids=(20,))), events([30, 20], "stop"))
    assert (deltas[-1].finish, deltas[-1].stop) == ("stop", 20)


@given(start=st.integers(0, len(TEXT) - 1), length=st.integers(1, 6))
def test_a_stop_string_ends_the_choice(bpe: Tokenizer, start: int, length: int) -> None:
    stop = TEXT[start : start + length]
    choice = ChoiceText(bpe, params(stop=(stop,)))
    deltas = feed(choice, events(bpe.encode(TEXT, add_special_tokens=False), "length"))
    assert "".join(delta.text for delta in deltas) == TEXT[: TEXT.index(stop)]
    assert (deltas[-1].finish, deltas[-1].stop) == ("stop", stop)
    assert choice.finished


def test_a_stop_string_stays_in_the_text_when_requested(bpe: Tokenizer) -> None:
    expected = params(stop=("brown",), include_stop_str_in_output=True)
    deltas = feed(ChoiceText(bpe, expected), events(bpe.encode(TEXT, add_special_tokens=False)))
    assert "".join(delta.text for delta in deltas) == "the quick brown"


def test_a_stop_token_of_the_request_is_in_the_text_when_requested(bpe: Tokenizer) -> None:
    ids = bpe.encode("so END", add_special_tokens=False)
    expected = params(stop_token_ids=(ids[-1],), include_stop_str_in_output=True)
    deltas = feed(ChoiceText(bpe, expected), events(ids, "stop"))
    assert "".join(delta.text for delta in deltas) == "so END"
    assert (deltas[-1].finish, deltas[-1].stop) == ("stop", ids[-1])
    other = params(include_stop_str_in_output=True)
    assert feed(ChoiceText(bpe, other), events(ids, "stop"))[-1].text == ""  # the model's own end token


def test_a_parsed_reply_stops_in_its_answer_only(bpe: Tokenizer) -> None:
    ids = bpe.encode("<think>a quick b</think>the quick fox", add_special_tokens=False)
    thoughts = ReasoningParser(REASONING_FORMATS["qwen3"], "user")
    choice = ChoiceText(bpe, params(stop=("quick",)), reader=MessageParser(thoughts))
    deltas = feed(choice, events(ids, "length"))
    merged = MergedEvents()
    for delta in deltas:
        merged.add(delta.events)
    assert list(merged) == [ReasoningDelta("a quick b"), TextDelta("the ")]
    assert (deltas[-1].finish, deltas[-1].stop) == ("stop", "quick")
    assert len(deltas) < len(ids)


@pytest.mark.parametrize(("last", "called"), [("}", False), ("</tool_call>", True)])
def test_a_stop_token_within_a_call_ends_the_reply_without_it(
    bpe: Tokenizer, last: str, called: bool
) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": {}' + ("}}" if called else "")
    ids = bpe.encode(text + last, add_special_tokens=False)
    calls = ToolCallParser(FORMATS["hermes"], {"f": {}})
    choice = ChoiceText(bpe, params(stop_token_ids=(ids[-1],)), reader=MessageParser(calls=calls))
    last_delta = feed(choice, events(ids, "stop"))[-1]
    assert (last_delta.finish, last_delta.stop, last_delta.called) == ("stop", ids[-1], called)


def test_tokens_after_the_end_are_ignored(bpe: Tokenizer) -> None:
    tokens = events(bpe.encode(TEXT, add_special_tokens=False))
    choice = ChoiceText(bpe, params(stop=("quick",)))
    deltas = feed(choice, tokens)
    assert len(deltas) < len(tokens)
    assert choice.finish("abort") is None


def test_stop_strings_are_looked_for_only_after_min_tokens(bpe: Tokenizer) -> None:
    ids = bpe.encode("aXbXc", add_special_tokens=False)
    assert len(ids) == 5
    for least, text in [(0, "a"), (1, "a"), (2, "aXb"), (3, "aXb"), (4, "aXbXc")]:
        deltas = feed(ChoiceText(bpe, params(stop=("X",), min_tokens=least)), events(ids, "length"))
        assert "".join(delta.text for delta in deltas) == text


def test_held_back_text_comes_with_the_end(bpe: Tokenizer) -> None:
    ids = bpe.encode("one ST", add_special_tokens=False)
    deltas = feed(ChoiceText(bpe, params(stop=("STOP",))), events(ids, "length"))
    assert "".join(delta.text for delta in deltas) == "one ST"
    assert deltas[-1].text.endswith("ST")


def test_an_unfinished_character_at_the_end_may_complete_a_stop_string(bpe: Tokenizer) -> None:
    ids = bpe.encode("a🙃", add_special_tokens=False)[:-1]
    deltas = feed(ChoiceText(bpe, params(stop=("\ufffd",))), events(ids, "length"))
    assert ("".join(delta.text for delta in deltas), deltas[-1].finish) == ("a", "stop")


def test_an_end_without_a_token_brings_what_was_held_back(bpe: Tokenizer) -> None:
    choice = ChoiceText(bpe, params(stop=("STOP",)), choice=3)
    sent = feed(choice, events(bpe.encode("one ST", add_special_tokens=False)))
    assert choice.finish("abort") == ChoiceDelta(3, "ST", finish="abort")
    assert "".join(delta.text for delta in sent) == "one "


def test_repeats_are_dropped_and_gaps_are_errors(bpe: Tokenizer) -> None:
    tokens = events(bpe.encode(TEXT, add_special_tokens=False))
    choice = ChoiceText(bpe, params())
    assert choice.feed(tokens[0]) is not None
    assert choice.feed(tokens[0]) is None
    assert choice.feed(tokens[1]) is not None
    with pytest.raises(RuntimeError, match="got token 3, but token 2 is missing"):
        choice.feed(tokens[3])


def test_logprobs_carry_bytes_and_offsets_in_the_text(bpe: Tokenizer) -> None:
    ids = bpe.encode(TEXT, add_special_tokens=False)
    deltas = feed(ChoiceText(bpe, params(logprobs=2)), events(ids, "length", logprobs=True))
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    assert b"".join(entry.bytes for entry in logprobs) == TEXT.encode()
    assert [top.token for top in logprobs[0].top] == [5, 6]
    for entry in logprobs:
        if entry.bytes.isascii():
            assert TEXT.startswith(entry.bytes.decode(), entry.offset)
    assert any(not entry.bytes.isascii() for entry in logprobs)
