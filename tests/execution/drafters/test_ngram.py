"""Prompt lookup: what followed the last tokens before is guessed again."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from streamserve.engine.plan import DraftRequest
from streamserve.execution.drafters.ngram import NGramDrafter
from streamserve.execution.grammar import Grammars
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.grammar import vocabulary
from streamserve.text.tokenizer import Tokenizer
from tests.text.folders import byte_level_folder


def ask(tokens: list[int], keep: int = 0, epoch: int = 0, depth: int = 4, id: int = 1) -> DraftRequest:
    return DraftRequest(id, epoch, keep, tokens, 0, 0, SamplingParams(), depth, 1, depth, 0, [])


def guess(drafter: NGramDrafter, request: DraftRequest) -> tuple[int, ...]:
    drafter.begin([request])
    trees = drafter.collect(0.0)
    return trees[request.id].tokens if trees else ()


def test_the_continuation_of_the_latest_occurrence_is_guessed():
    assert guess(NGramDrafter(), ask([1, 2, 3, 9, 1, 2, 4, 8, 1, 2])) == (2, 4, 8, 1, 2)


def test_a_longer_match_is_preferred_to_a_later_one():
    assert guess(NGramDrafter(), ask([5, 1, 2, 3, 7, 1, 2, 6, 5, 1, 2], depth=2)) == (2, 3, 7)


def test_text_without_repetition_gives_no_tree():
    assert guess(NGramDrafter(), ask([1, 2, 3, 4])) == ()


@given(st.lists(st.integers(0, 3), min_size=3, max_size=40), st.data())
def test_telling_it_in_pieces_with_steps_back_is_telling_it_at_once(tokens, data):
    drafter, told, epoch = NGramDrafter(), [], 0
    while len(told) < len(tokens):
        keep = len(told)
        if told and data.draw(st.booleans()):
            keep, epoch = data.draw(st.integers(0, len(told))), epoch + 1
        end = data.draw(st.integers(keep + 1, len(tokens)))
        found = guess(drafter, ask(tokens[keep:end], keep, epoch))
        told = tokens[:end]
    assert found == guess(NGramDrafter(), ask(tokens))


def test_a_released_sequence_is_forgotten():
    drafter = NGramDrafter()
    guess(drafter, ask([1, 2, 1, 2]))
    drafter.release([1])
    assert guess(drafter, ask([1, 2])) == ()


def test_what_the_grammar_forbids_is_not_guessed(tmp_path: Path):
    tokenizer, eos = Tokenizer.from_folder(byte_level_folder(tmp_path)), (3,)
    grammars = Grammars(lambda: vocabulary(tokenizer, tokenizer.vocab_size, eos), eos)
    prompt, output = tokenizer.encode("ab7ab7ab")[1:], tokenizer.encode("7ab")[1:]
    params = SamplingParams(grammar=Grammar(kind="regex", text="7ab7b*"))
    request = DraftRequest(1, 0, 0, [*prompt, *output], 0, len(output), params, 4, 1, 4, 0, [])
    free = replace(request, params=SamplingParams())
    assert tokenizer.decode(list(guess(NGramDrafter(eos, grammars), free)[1:])) == "7ab"
    assert tokenizer.decode(list(guess(NGramDrafter(eos, grammars), request)[1:])) == "7"


def test_only_allowed_tokens_are_guessed():
    params = SamplingParams(allowed_token_ids=[1, 2, 4])
    request = DraftRequest(1, 0, 0, [1, 2, 4, 9, 1, 2], 0, 1, params, 4, 1, 4, 0, [])
    assert guess(NGramDrafter(), request) == (2, 4)
