"""Prompts are tokenized without blocking the event loop, and their tokens have offsets in an echo."""

import threading
from pathlib import Path

import msgspec
import pytest

from streamserve.api.http.memory import MemoryAccount
from streamserve.api.http.side_thread import SideThread
from streamserve.api.openai.logprobs import chat_logprobs, completion_logprobs, echo_logprobs
from streamserve.api.openai.prompts import Encoder
from streamserve.api.prompt import EncodedPrompt
from streamserve.protocol.messages import LikelyToken, PromptLogprob
from streamserve.text.output import TokenLogprob, TopToken
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import ScriptedGenerator
from tests.text.folders import byte_level_folder, sentencepiece_folder


class RecordingTokenizer(Tokenizer):
    """A tokenizer that records the thread of its last call."""

    thread: threading.Thread | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.thread = threading.current_thread()
        return super().encode(text, add_special_tokens)

    def encode_without_gil(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        self.thread = threading.current_thread()
        return super().encode_without_gil(texts, add_special_tokens)


@pytest.mark.parametrize(
    ("texts", "in_thread"), [(["short"], False), (["x" * 9000], True), (["x" * 90] * 100, True)]
)
async def test_long_texts_are_tokenized_in_a_separate_thread(
    generator: ScriptedGenerator, tmp_path: Path, texts: list[str], in_thread: bool
) -> None:
    tokenizer = RecordingTokenizer.from_folder(byte_level_folder(tmp_path))
    assert isinstance(tokenizer, RecordingTokenizer)
    model = msgspec.structs.replace(generator.model, max_model_len=10_000)
    charge = MemoryAccount(10 << 20).charge()
    encoder = Encoder(generator.replaced(tokenizer=tokenizer, model=model), SideThread(), charge)
    prompts = await encoder.encode(texts, True, "prompt")
    assert [prompt.text for prompt in prompts] == texts
    assert (tokenizer.thread is not threading.current_thread()) == in_thread
    assert [prompt.ids for prompt in prompts] == [tokenizer.encode(text) for text in texts]
    assert charge.held > 8 * sum(len(prompt.ids) for prompt in prompts)


def offsets(tokenizer: Tokenizer, prompt: EncodedPrompt, skip: bool = True) -> list[int]:
    """Return the offsets of a prompt's tokens, after checking that they are within the echo."""
    positions = list(prompt.offsets(tokenizer, skip))
    echo = prompt.echo(tokenizer, skip)
    assert positions == sorted(positions)
    assert positions[-1] <= len(echo)
    return positions


def test_an_added_token_takes_no_characters(generator: ScriptedGenerator) -> None:
    tokenizer = generator.tokenizer
    ids = tokenizer.encode("ab")
    assert ids[0] == tokenizer.bos_token_id
    assert offsets(tokenizer, EncodedPrompt(ids, "ab")) == [0, 0, 1]
    assert offsets(tokenizer, EncodedPrompt(ids)) == [0, 0, 1]


def test_a_special_token_in_the_text_takes_its_characters(generator: ScriptedGenerator) -> None:
    tokenizer = generator.tokenizer
    text = "<|begin|>a<|end|>b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert offsets(tokenizer, EncodedPrompt(ids, text)) == [0, 9, 10, 17]
    assert EncodedPrompt(ids).echo(tokenizer, True) == "ab"
    assert offsets(tokenizer, EncodedPrompt(ids)) == [0, 0, 1, 1]
    assert offsets(tokenizer, EncodedPrompt(ids), skip=False) == [0, 9, 10, 17]


def test_offsets_with_spaces_inside_of_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(sentencepiece_folder(tmp_path))
    text = "hello hello"
    assert offsets(tokenizer, EncodedPrompt(tokenizer.encode(text), text)) == [0, 0, 5]


def test_a_score_of_minus_infinity_is_a_number_in_json(generator: ScriptedGenerator) -> None:
    never = float("-inf")
    entry = TokenLogprob(5, b"a", never, 0, (TopToken(6, b"b", never),))
    assert completion_logprobs([entry]).token_logprobs == [-9999.0]
    assert completion_logprobs([entry]).top_logprobs == [{"b": -9999.0, "a": -9999.0}]
    assert chat_logprobs([entry]).content[0].logprob == -9999.0


def test_part_of_a_character_is_written_by_its_bytes() -> None:
    entry = TokenLogprob(5, b"\xf0\x9f", -1.0, 0, ())
    assert completion_logprobs([entry]).tokens == [r"\xf0\x9f"]
    entries = chat_logprobs([entry]).content[0]
    assert (entries.token, entries.bytes) == (r"\xf0\x9f", [0xF0, 0x9F])


def test_of_two_tokens_with_the_same_text_the_likelier_is_entries() -> None:
    entry = TokenLogprob(5, b"a", -3.0, 0, (TopToken(6, b"a", -0.5), TopToken(7, b"b", -1.0)))
    assert completion_logprobs([entry]).top_logprobs == [{"a": -0.5, "b": -1.0}]


def test_alternatives_of_an_echo_are_as_many_as_requested(generator: ScriptedGenerator) -> None:
    tokenizer = generator.tokenizer
    ids = tokenizer.encode("ab", add_special_tokens=False)
    top = [LikelyToken(60, -0.1), LikelyToken(61, -0.2), LikelyToken(62, -0.3)]
    scores = echo_logprobs(
        tokenizer, EncodedPrompt(ids, "ab"), [PromptLogprob(ids[1], -4.0, 9, top)], True, 2
    )
    assert (scores.tokens, scores.token_logprobs) == (["a", "b"], [None, -4.0])
    assert scores.top_logprobs[0] is None
    assert len(scores.top_logprobs[1] or ()) == 3
