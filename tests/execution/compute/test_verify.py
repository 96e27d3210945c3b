"""Whatever the tree drafts, the emitted tokens are the target's own tokens."""

from hypothesis import event, given
from hypothesis import strategies as st

from streamserve.contracts.tree import TokenTree, chain
from streamserve.execution.compute.verify import Walk, verify
from tests.execution.strategies import trees


def target(text: tuple[int, ...]) -> int:
    """A target model over three tokens, so that draft tokens are often right."""
    return hash(text) % 3


def plain(text: tuple[int, ...], count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(target((*text, *tokens)))
    return tokens


def verified(texts: list[tuple[int, ...]], forest: list[TokenTree]) -> list[Walk]:
    walks = [Walk(tree) for tree in forest]

    def sample(numbers: list[int]) -> list[int]:
        for number in numbers:  # A node's logits are the logits of the text that leads to it.
            path = [walks[number].tree.tokens[node] for node in walks[number].path[1:]]
            assert path == walks[number].tokens
        return [target((*texts[number], *walks[number].tokens)) for number in numbers]

    verify(walks, sample)
    return walks


@given(st.lists(st.tuples(st.integers(0, 1000), trees(max_nodes=14, vocab_size=3)), max_size=5))
def test_emitted_tokens_are_those_of_plain_decoding(requests):
    texts = [(text,) for text, _ in requests]
    walks = verified(texts, [tree for _, tree in requests])
    for walk, text in zip(walks, texts, strict=True):
        assert walk.tokens == plain(text, len(walk.tokens))
        assert walk.path == walk.tree.path(walk.path[-1])
        assert len(walk.path) == len(walk.tokens)
        # It stopped no earlier than necessary.
        assert walk.tree.child(walk.path[-1], walk.tokens[-1]) is None
        event(f"accepted {len(walk.path) - 1}")


def test_a_right_chain_is_accepted_whole_and_yields_one_token_more():
    text = (5,)
    truth = plain(text, 4)
    (walk,) = verified([text], [chain([9, *truth])])
    assert walk.path == [0, 1, 2, 3, 4]
    assert walk.tokens == plain(text, 5)


def test_the_right_branch_is_taken_after_a_wrong_one():
    text = (8,)
    first, second = plain(text, 2)
    wrong = (first + 1) % 3
    tree = TokenTree((9, wrong, first, second, second), (-1, 0, 0, 1, 2), (0.0,) * 5, (1.0,) * 5)
    (walk,) = verified([text], [tree])
    assert walk.path == [0, 2, 4]


def test_a_wrong_draft_token_yields_the_target_token():
    text = (4,)
    (truth,) = plain(text, 1)
    (walk,) = verified([text], [chain([9, (truth + 1) % 3])])
    assert walk.tokens == [truth]
