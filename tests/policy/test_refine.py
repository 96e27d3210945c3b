"""A cost curve that is corrected by what steps really took."""

from streamserve.policy.refine import LIMIT, RefinedCost


def prior(rows: int, kv_tokens: int) -> float:
    return 1.0 + rows / 10


def test_without_observations_the_profile_stands():
    assert RefinedCost(prior)(10, 0) == 2.0


def test_observations_correct_their_rows_and_the_unseen_ones():
    cost = RefinedCost(prior)
    for _ in range(100):
        cost.observe(10, 0, 4.0)
    assert abs(cost(10, 0) - 4.0) < 0.01
    assert abs(cost(20, 0) - 6.0) < 0.01, "nothing was seen there: the same factor holds"
    for _ in range(50):
        cost.observe(20, 0, 3.0)
    assert abs(cost(20, 0) - 3.0) < 0.2
    assert abs(cost(10, 0) - 4.0) < 0.2, "it was not long ago"


def test_what_was_seen_long_ago_is_forgotten():
    """Four rows hiccuped when they were tried: nobody would ever try them again."""
    cost = RefinedCost(prior)
    for _ in range(20):
        cost.observe(1, 0, prior(1, 0))
    cost.observe(4, 0, 2.5 * prior(4, 0))
    assert cost(4, 0) > 1.5 * prior(4, 0)
    for _ in range(500):
        cost.observe(1, 0, prior(1, 0))
    assert cost(4, 0) < 1.05 * prior(4, 0)


def test_one_hiccup_moves_little():
    cost = RefinedCost(prior)
    for _ in range(20):
        cost.observe(1, 0, prior(1, 0))
    cost.observe(1, 0, 1000.0)
    assert cost(1, 0) < prior(1, 0) * (1 + 0.1 * LIMIT)
