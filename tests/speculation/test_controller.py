"""What speculation learns of the trees that were drafted, verified or not."""

import pytest

from streamserve.speculation import policies
from streamserve.speculation.controller import FIRST_HITS, Speculation
from streamserve.speculation.outlook import Candidate, Outlook
from streamserve.speculation.policies import parse_policy
from streamserve.speculation.shapes import PLAIN, Shape
from streamserve.speculation.slo import NO_NEED
from streamserve.speculation.tree import TokenTree, root

CHAIN = TokenTree((7, 3, 5), (-1, 0, 1), (1.0, 0.9, 0.9), (1.0, 0.9, 0.8))


def speculation() -> Speculation:
    return Speculation(parse_policy("fixed:4"), lambda rows, kv_tokens: 1.0)


def draft(one: Speculation, tree: TokenTree, asked: Shape) -> TokenTree:
    return one.choose({1: tree}, {1: False}, 1, {1: NO_NEED}, 0, 0.0, 64, {1: asked})[1]


def learn(tree: TokenTree, asked: Shape, tokens: list[int], times: int = 50) -> list[list[float]]:
    one = speculation()
    for _ in range(times):
        one.verified(1, draft(one, tree, asked), tokens, sampled=False)
    return one._covers()


def test_levels_are_learned_apart() -> None:
    covers = learn(CHAIN, Shape(2, 1), [3, 9])
    assert covers[0][0] > 0.9, "always right"
    assert covers[0][1] < 0.35, "always wrong"
    assert covers[0][2] == pytest.approx(covers[0][1]), "nothing is known of it but what holds above"


def test_what_was_asked_for_and_not_guessed_was_not_right() -> None:
    not_asked, asked = learn(CHAIN, Shape(2, 1), [3, 5, 9]), learn(CHAIN, Shape(3, 1), [3, 5, 9])
    assert not_asked[0][2] > FIRST_HITS[0]
    assert asked[0][2] < 0.35


def test_a_sibling_counts_for_itself() -> None:
    tree = TokenTree((7, 3, 5), (-1, 0, 0), (1.0, 0.9, 0.4), (1.0, 0.9, 0.4))
    covers = learn(tree, Shape(1, 2), [5])
    assert covers[0][0] < 0.35
    assert covers[1][0] - covers[0][0] > 0.6


def test_trees_that_nobody_verified_teach_as_well() -> None:
    one = speculation()
    draft(one, CHAIN, Shape(2, 1))
    one.verified(1, root(7), [8], sampled=False)
    assert one._covers()[0][0] < FIRST_HITS[0]
    assert one.counters.verified == 0


def test_what_was_drafted_for_an_earlier_step_teaches_nothing() -> None:
    one = speculation()
    draft(one, CHAIN, Shape(2, 1))
    one.shapes([], 1, 0, 16)
    one.verified(1, root(7), [8], sampled=False)
    assert one._covers()[0][0] == FIRST_HITS[0]


def test_a_draft_reads_a_long_text_only_for_what_comes_behind_it() -> None:
    """A tenth of a step a token to read, and guesses that are right two times out of three."""
    one = Speculation(parse_policy("goodput"), lambda rows, kv_tokens: 1.0, lambda rows: rows / 10)
    assert one.reading(1, 0)(20, 0), "what a step left unread is read beside the first guess"
    assert one.reading(1, 0)(100, 64)
    assert not one.reading(1, 0)(100, 4)
    assert not one.reading(1, 0)(1000, 64)
    assert not one.reading(8, 0)(100, 64), "a step that eight share costs each an eighth"
    fixed = Speculation(parse_policy("fixed:4"), lambda rows, kv_tokens: 1.0, lambda rows: rows / 10)
    assert fixed.reading(1, 0)(1000, 4), "who asks for a fixed shape gets it"


@pytest.mark.parametrize(("tokens", "right", "tested"), [([8], 0, 1), ([3, 9], 1, 2), ([3, 5, 9], 2, 2)])
def test_what_stands_behind_a_wrong_guess_was_not_tested(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], right: int, tested: int
) -> None:
    seen: list[Outlook] = []
    one = speculation()
    monkeypatch.setattr(
        policies, "shapes", lambda policy, outlook, flow: (seen.append(outlook) or [PLAIN], flow)
    )
    one.verified(1, draft(one, CHAIN, Shape(2, 1)), tokens, sampled=False)
    one.shapes([Candidate(2, 2)], 1, 0, 16)
    assert (seen[0].right, seen[0].tested) == (right, tested)
    assert seen[0].acceptance == right / 2
