"""A tree node's mask has the tokens that may follow a plain chain to that node."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from streamserve.contracts.tree import TokenTree
from streamserve.execution.compute.grammar import GrammarError, Grammars, Mask, Matcher
from streamserve.protocol.grammar import Grammar
from streamserve.text.grammar import vocabulary
from streamserve.text.tokenizer import Tokenizer
from tests.execution.strategies import trees
from tests.text.folders import byte_level_folder, sentencepiece_folder

EOS = (3, 1)
ABC = Grammar(kind="regex", text="[a-f]{1,6}(x|yz)*")
JSON = Grammar(
    kind="json",
    text=json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}),
)


@pytest.fixture(scope="module", params=[byte_level_folder, sentencepiece_folder])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    make: Callable[[Path], Path] = request.param
    return Tokenizer.from_folder(make(tmp_path_factory.mktemp("tokens")))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: vocabulary(tokenizer, tokenizer.vocab_size + 5, EOS), EOS)


def test_a_dead_end_is_told_without_the_parsers_state(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """A dead end is reported even if the parser's state does not show it: no text continues an `a`, which the
    compiler does not detect."""
    matcher = grammars.begin(Grammar(kind="lark", text='start: "a" X\nX: /b/ & /c/'), [])
    letter = next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"a")
    matcher.commit([letter])
    mask = matcher.allowed([])
    assert mask is not None
    assert set(tokens_of(mask)) == set(EOS)
    assert matcher.error == (
        "the output came to a dead end of its grammar: after it, the grammar allows no token and no end"
    )


def tokens_of(mask: Mask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def walk(matcher: Matcher, rng: random.Random, limit: int) -> list[int]:
    """Return some tokens that the grammar allows in sequence."""
    path: list[int] = []
    while len(path) < limit:
        mask = matcher.allowed(path)
        assert mask is not None
        candidates = [token for token in tokens_of(mask) if token not in EOS]
        if not candidates:
            break
        path.append(rng.choice(candidates))
    return path


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, tokens)).decode()


def replayed(grammars: Grammars, grammar: Grammar, tokens: list[int]) -> Mask | None:
    """Return the mask after `tokens`, computed by a new matcher. The end is allowed only where the text may
    end."""
    matcher = grammars.begin(grammar, [])
    for token in tokens:
        mask = matcher.allowed([])
        assert mask is not None
        if token not in tokens_of(mask):
            return None
        if token in EOS:
            return matcher.allowed([token])
        matcher.commit([token])
    return matcher.allowed([])


@given(
    trees(max_nodes=12),
    st.integers(0, 10_000),
    st.sampled_from([ABC, JSON]),
    st.permutations(range(12)),
)
def test_a_trees_masks_are_those_of_chains(
    grammars: Grammars, tree: TokenTree, seed: int, grammar: Grammar, order: list[int]
) -> None:
    """A tree's masks equal the masks of chains. Nodes are visited in any order; each is replayed by a matcher
    that has never seen another path."""
    rng = random.Random(seed)
    committed = walk(grammars.begin(grammar, []), rng, rng.randint(0, 3))
    tree = _draft(grammars.begin(grammar, committed), tree, rng)
    matcher = grammars.begin(grammar, committed)
    allowed_nodes = 0
    for node in (node for node in order if node < len(tree)):
        path = [tree.tokens[ancestor] for ancestor in tree.path(node)[1:]]
        mask = matcher.allowed(path)
        expected = replayed(grammars, grammar, [*committed, *path])
        assert (mask is None) == (expected is None)
        if mask is None or expected is None:
            continue
        allowed_nodes += 1
        np.testing.assert_array_equal(mask, expected)
    event(f"{allowed_nodes} nodes allowed")
    assert allowed_nodes >= 1  # the root
    before = grammars.begin(grammar, committed).allowed([])
    np.testing.assert_array_equal(matcher.allowed([]), before)  # only a commit moves it


def _draft(matcher: Matcher, tree: TokenTree, rng: random.Random) -> TokenTree:
    """Return a tree in which the grammar allows about two of three draft tokens."""
    tokens = list(tree.tokens)
    for node in range(1, len(tree)):
        mask = matcher.allowed([tokens[ancestor] for ancestor in tree.path(node)[1:-1]])
        if mask is not None and rng.random() < 0.7:
            tokens[node] = rng.choice(tokens_of(mask))
    return TokenTree(tuple(tokens), tree.parents, tree.scores, tree.accept)


def test_a_mask_is_all_that_the_grammar_allows_and_no_more(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """A mask has exactly the tokens that the grammar allows: each token is tried by its bytes. Special tokens
    never count as their text."""
    matcher = grammars.begin(Grammar(kind="regex", text="h?[elo]{2,4}"), [])
    mask = matcher.allowed([])
    assert mask is not None
    fitting = ["h", "he", "hel", "hell", "hello", "el", "ell", "ello", "e", "l", "o", "ll", "lo", "ho", "oo"]
    expected = {
        token
        for token in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(token).decode(errors="replace") in fitting
        and not tokenizer.is_special(token)
    }
    assert {text_of(tokenizer, [token]) for token in tokens_of(mask)} == {
        text_of(tokenizer, [token]) for token in expected
    }


def test_the_end_is_allowed_where_the_text_may_end_and_forced_where_it_must(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    matcher = grammars.begin(Grammar(kind="regex", text="ab?"), [])
    first, second = (
        next(t for t in range(4, 400) if tokenizer.token_bytes(t) == sign) for sign in (b"a", b"b")
    )
    ends = sorted(EOS)

    def allowed(path: list[int]) -> list[int]:
        mask = matcher.allowed(path)
        assert mask is not None
        return tokens_of(mask)

    assert not set(allowed([])) & set(EOS)
    assert set(allowed([first])) > set(EOS)
    assert allowed([first, second]) == ends
    assert allowed([first, EOS[1]]) == ends
    assert matcher.allowed([second]) is None
    assert set(allowed([first])) > set(EOS)  # none of these changes was permanent
    matcher.commit([first, EOS[0]])
    assert set(allowed([])) > set(EOS)
    assert matcher.ends(EOS[1])
    assert not matcher.ends(first)
    assert not matcher.error


def test_a_free_part_comes_first(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = Grammar(kind="choice", text='["yes"]', after="</think>", opening="<think>")
    bytes_of = {
        tokenizer.token_bytes(t): t for t in range(tokenizer.vocab_size) if not tokenizer.is_special(t)
    }

    def follows(text: str) -> bool:
        ids = [bytes_of[sign.encode()] for sign in text]
        matcher = grammars.begin(grammar, [])
        return matcher.allowed(ids) is not None and tokens_of(matcher.allowed(ids)) == sorted(EOS)  # type: ignore[arg-type]

    if b"<" not in bytes_of:
        bytes_of |= {bytes([b]): tokenizer.encode(chr(b), False)[-1] for b in b"<>/\n"}
    assert follows("<think>hm</think>\n\nyes")
    assert follows("yes")
    assert not follows("hm</think>yes")
    assert not follows("<think>hm</think>no")


def test_compiled_grammars_are_kept_and_their_state_is_not_shared(grammars: Grammars) -> None:
    rng = random.Random(1)
    first = grammars.begin(ABC, [])
    moved = walk(first, rng, 2)
    first.commit(moved)
    np.testing.assert_array_equal(grammars.begin(ABC, moved).allowed([]), first.allowed([]))
    fresh, again = grammars.begin(ABC, []).allowed([]), grammars.begin(ABC, []).allowed([])
    np.testing.assert_array_equal(fresh, again)


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        (Grammar(kind="regex", text="(("), "cannot be compiled"),
        (Grammar(kind="json", text='{"type": "objekt"}'), "cannot be compiled"),
        (Grammar(kind="json", text='{"uniqueItems": true, "type": "array"}'), "uniqueItems"),
        (Grammar(kind="json", text="{"), "is not JSON"),
        (Grammar(kind="lark", text="start: nowhere"), "cannot be compiled"),
    ],
)
def test_what_cannot_be_compiled(grammars: Grammars, grammar: Grammar, complaint: str) -> None:
    with pytest.raises(GrammarError, match=complaint):
        grammars.begin(grammar, [])


def test_without_an_end_of_text_there_are_no_grammars(tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarError, match="no end-of-text token"):
        Grammars(lambda: vocabulary(tokenizer, 10, ()), ()).begin(ABC, [])


@given(seed=st.integers(0, 10_000), grammar=st.sampled_from([ABC, JSON]))
def test_as_much_of_a_path_is_let_through_as_its_tokens_one_by_one(grammars, seed, grammar):
    rng = random.Random(seed)
    path = walk(grammars.begin(grammar, []), rng, 6)
    at = rng.randint(0, len(path))
    path[at:at] = rng.choice([[], [rng.randrange(grammars._size)], [EOS[0]]])
    committed_length = rng.randint(0, min(at, len(path)))
    if any(token in EOS for token in path[:committed_length]):
        committed_length = 0
    matcher = grammars.begin(grammar, path[:committed_length])
    accepted = matcher.count_accepted(path[committed_length:])
    ends = next((i + 1 for i, token in enumerate(path) if token in EOS), len(path))
    one_by_one = committed_length
    while one_by_one < ends:
        mask = grammars.begin(grammar, path[:one_by_one]).allowed([])
        assert mask is not None
        if path[one_by_one] not in tokens_of(mask):
            break
        one_by_one += 1
    assert committed_length + accepted == one_by_one
    event("all" if committed_length + accepted == len(path) else "cut")
