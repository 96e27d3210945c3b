"""A drafter drops its state of a sequence when the epoch changes, and then drafts like a new drafter."""

from collections.abc import Callable
from pathlib import Path

import pytest

from streamserve.contracts.plan import Drafter, DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.execution.compute.grammar import Grammars
from streamserve.execution.drafters.ngram import NGramDrafter
from streamserve.execution.loading.load import load, make_drafter
from streamserve.execution.loading.loaded import Loaded
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.grammar import vocabulary
from streamserve.text.tokenizer import Tokenizer
from tests.exact.speculating import make_pair

BLOCKS = list(range(1, 9))
PATTERN = [5, 6, 7, 8, 9, 5, 6, 7, 8]
REPEATED = PATTERN * 3
Make = Callable[[], Drafter]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft"))


def loaded(pair: tuple[Path, Path], draft: str) -> Loaded:
    """Return a target with a drafter of this kind. A new drafter has no state of sequences."""
    path = str(pair[1]) if draft == "model" else draft
    tokenizer = Tokenizer.from_folder(pair[0])
    config = ModelConfig(path=str(pair[0]), draft=path, num_blocks=64, threads=1, dtype="float32")
    return load(config, lambda size, eos: vocabulary(tokenizer, size, eos))


@pytest.fixture(params=["model", "self:1", "ngram", "service"])
def make(request: pytest.FixtureRequest, pair: tuple[Path, Path]) -> Make:
    """Return a function that makes drafters of each kind. A draft service's drafter has no grammars."""

    def made() -> Drafter:
        if request.param == "service":
            return make_drafter(loaded(pair, "none"))
        drafter = loaded(pair, request.param).drafter
        assert drafter is not None
        return drafter

    return made


def make_request(
    tokens: list[int], params: SamplingParams, output: int, epoch: int = 0, computed: int = 0
) -> DraftRequest:
    return DraftRequest(1, epoch, tokens, len(tokens), 0, output, params, 4, 2, 8, computed, BLOCKS)


def tree(drafter: Drafter, request: DraftRequest) -> TokenTree | None:
    drafter.begin([request])
    return drafter.collect(0.0).get(1)


PATH = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.8)
PARAMS = {
    "penalties": PATH,
    "sampled penalties": SamplingParams(temperature=0.8, seed=3, presence_penalty=2.0, frequency_penalty=2.0),
    "minimum": SamplingParams(temperature=0.0, min_tokens=6, logit_bias={3: 50.0}),
    "bias": SamplingParams(temperature=0.0, logit_bias={6: 60.0}, frequency_penalty=2.0),
    "allowed": SamplingParams(temperature=0.0, allowed_token_ids=(5, 6, 7, 8), frequency_penalty=2.0),
}


@pytest.mark.each_pair
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("outputs", [0, 2, 12])
def test_after_an_edit_a_drafter_drafts_as_a_new_one(make: Make, name: str, outputs: int) -> None:
    """After an edit, a drafter drafts like a new one. It had drafted after seven outputs; the edit leaves
    other tokens, more or fewer, and other outputs."""
    params = PARAMS[name]
    first = [*REPEATED, 11, 12, 13, 14, 15, 16, 17]
    edited = [*REPEATED, *(PATTERN * 2)[:outputs]]
    old = make()
    tree(old, make_request(first, params, 7))
    after_edit = tree(old, make_request(edited, params, outputs, epoch=1, computed=len(REPEATED)))
    fresh = tree(make(), make_request(edited, params, outputs, epoch=1))
    assert after_edit == fresh
    old.release([1])
    assert tree(old, make_request(edited, params, outputs, epoch=2)) == fresh


def test_an_edit_changes_what_a_path_may_hold(make: Make) -> None:
    """An edit changes the tokens that a path may have: with the earlier outputs, penalties would forbid
    tokens that are allowed now. So the test above tests something."""
    if make().group is None:
        pytest.skip("n-grams know no penalties")
    drafter = make()
    first = [*REPEATED, 5, 6, 7, 8, 9]
    with_outputs = tree(drafter, make_request(first, PATH, 5))
    as_prompt = tree(make(), make_request(first, PATH, 0))
    assert with_outputs != as_prompt


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_a_grammar_begins_again_after_an_edit(pair: tuple[Path, Path], kind: str) -> None:
    tokenizer = Tokenizer.from_folder(pair[0])
    grammar = SamplingParams(temperature=0.0, grammar=Grammar(kind="regex", text="[0-9]{4}[a-z]{40}"))
    prompt = [*tokenizer.encode("ab12cd ab12cd"), *tokenizer.encode("1234")]
    digits = [tokenizer.encode(digit)[-1] for digit in "1234"]
    eos = (3,)
    drafter: Drafter
    if kind == "ngram":
        grammars = Grammars(lambda: vocabulary(tokenizer, 320, eos), eos)
        drafter, new = NGramDrafter(eos, grammars), NGramDrafter(eos, grammars)
    else:
        drafter, new = (loaded(pair, "model").drafter for _ in range(2))  # type: ignore[assignment]
    tree(drafter, make_request([*prompt, *digits], grammar, 4))  # From now on letters must follow.
    edited = [*prompt, digits[0], digits[1]]
    after_edit = tree(drafter, make_request(edited, grammar, 2, epoch=1, computed=len(prompt)))
    fresh = tree(new, make_request(edited, grammar, 2, epoch=1))
    assert after_edit == fresh
    assert kind == "model" or fresh is not None
