"""Prompt lookup drafts the tokens that followed the previous occurrence of the last n-gram."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.plan import DraftRequest
from streamserve.execution.compute.grammar import Grammars
from streamserve.execution.drafters.ngram import NGramDrafter
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.grammar import vocabulary
from streamserve.text.tokenizer import Tokenizer
from tests.text.folders import byte_level_folder


def make_request(tokens: list[int], epoch: int = 0, depth: int = 4, id: int = 1) -> DraftRequest:
    return DraftRequest(id, epoch, tokens, len(tokens), 0, 0, SamplingParams(), depth, 1, depth, 0, [])


def draft(drafter: NGramDrafter, request: DraftRequest) -> tuple[int, ...]:
    drafter.begin([request])
    trees = drafter.collect(0.0)
    return trees[request.id].tokens if trees else ()


def test_the_continuation_of_the_latest_occurrence_is_drafted():
    assert draft(NGramDrafter(), make_request([1, 2, 3, 9, 1, 2, 4, 8, 1, 2])) == (2, 4, 8, 1, 2)


def test_a_longer_match_is_preferred_to_a_later_one():
    assert draft(NGramDrafter(), make_request([5, 1, 2, 3, 7, 1, 2, 6, 5, 1, 2], depth=2)) == (2, 3, 7)


def test_text_without_repetition_gives_no_tree():
    assert draft(NGramDrafter(), make_request([1, 2, 3, 4])) == ()


@given(st.lists(st.integers(0, 3), min_size=3, max_size=40), st.data())
def test_growth_and_edits_are_equivalent_to_one_request(tokens, data):
    """Growth and edits are equivalent to a single request. Within an epoch a sequence only grows; in another
    epoch it may be any sequence."""
    drafter, length = NGramDrafter(), 0
    for epoch in range(data.draw(st.integers(0, 3))):
        draft(drafter, make_request(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=40)), epoch))
    while length < len(tokens):
        length = data.draw(st.integers(length + 1, len(tokens)))
        drafted = draft(drafter, replace(make_request(tokens, epoch=9), length=length))
        assert drafted == draft(NGramDrafter(), make_request(tokens[:length]))


def test_a_released_sequence_is_forgotten():
    drafter = NGramDrafter()
    draft(drafter, make_request([1, 2, 1, 2]))
    drafter.release([1])
    assert draft(drafter, make_request([1, 2])) == ()


def test_what_the_grammar_forbids_is_not_drafted(tmp_path: Path):
    tokenizer, eos = Tokenizer.from_folder(byte_level_folder(tmp_path)), (3,)
    grammars = Grammars(lambda: vocabulary(tokenizer, tokenizer.vocab_size, eos), eos)
    prompt, output = tokenizer.encode("ab7ab7ab")[1:], tokenizer.encode("7ab")[1:]
    params = SamplingParams(grammar=Grammar(kind="regex", text="7ab7b*"))
    request = DraftRequest(
        1, 0, [*prompt, *output], len(prompt + output), 0, len(output), params, 4, 1, 4, 0, []
    )
    free = replace(request, params=SamplingParams())
    assert tokenizer.decode(list(draft(NGramDrafter(eos, grammars), free)[1:])) == "7ab"
    assert tokenizer.decode(list(draft(NGramDrafter(eos, grammars), request)[1:])) == "7"


def test_only_allowed_tokens_are_drafted():
    params = SamplingParams(allowed_token_ids=[1, 2, 4])
    request = DraftRequest(1, 0, [1, 2, 4, 9, 1, 2], 6, 0, 1, params, 4, 1, 4, 0, [])
    assert draft(NGramDrafter(), request) == (2, 4)
