"""A cost curve that is corrected by what steps really took."""

from streamserve.speculation.learned_cost import LIMIT, RefinedCost


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
        cost.observe(20, 0, 5.0)
    assert abs(cost(20, 0) - 5.0) < 0.2
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


def test_a_figure_that_only_one_batch_size_has_wrong_is_corrected_there_alone():
    """Plain steps of eight tokens measured three times too slow; seven and nine as they are."""
    cost = RefinedCost(lambda rows, kv_tokens: prior(rows, kv_tokens) * (3.0 if rows == 8 else 1.0))
    for rows in (7, 8, 9) * 5:
        cost.observe(rows, 0, prior(rows, 0))
    for rows in (7, 8, 9):
        assert abs(cost(rows, 0) / prior(rows, 0) - 1) < 0.05


def test_a_batch_size_never_seen_costs_no_more_than_a_larger_one():
    """The profile has all steps of fewer than four tokens three times too slow, and only larger ones ran."""
    cost = RefinedCost(lambda rows, kv_tokens: prior(rows, kv_tokens) * (3.0 if rows < 4 else 1.0))
    for _ in range(10):
        cost.observe(4, 0, prior(4, 0))
    assert cost(1, 0) <= prior(4, 0)


def test_a_batch_size_never_seen_costs_no_less_than_a_smaller_one():
    cost = RefinedCost(lambda rows, kv_tokens: prior(rows, kv_tokens) / (3.0 if rows >= 12 else 1.0))
    for _ in range(10):
        cost.observe(10, 0, prior(10, 0))
    assert cost(12, 0) >= prior(10, 0) * 0.999


def test_unseen_batch_sizes_take_what_the_nearest_seen_ones_say():
    cost = RefinedCost(prior)
    for _ in range(10):
        cost.observe(4, 0, 2 * prior(4, 0))
        cost.observe(16, 0, 3 * prior(16, 0))
    assert abs(cost(2, 0) / prior(2, 0) - 2) < 0.05
    assert 2 < cost(8, 0) / prior(8, 0) < 3
    assert abs(cost(2000, 0) / prior(2000, 0) - 3) < 0.05


def test_a_profile_that_steps_contradict_for_long_is_known_for_it():
    right, slow, hiccups, wrong_in_part = (RefinedCost(prior) for _ in range(4))
    for step in range(600):
        rows = 1 + step % 8
        right.observe(rows, 0, prior(rows, 0) * (1.1 if step % 2 else 0.95))
        hiccups.observe(rows, 0, prior(rows, 0) * (3.0 if step % 20 == 0 else 1.0))
        slow.observe(rows, 0, 1.4 * prior(rows, 0))
        wrong_in_part.observe(rows, 0, prior(rows, 0) * (2.0 if rows < 5 else 1.0))
        if step == 100:
            assert not slow.contradicted, "not for long yet"
    assert not right.contradicted
    assert not hiccups.contradicted
    assert slow.contradicted
    assert wrong_in_part.contradicted
    assert 1.3 < slow.disagreement < 1.5


def test_with_another_profile_what_was_learned_of_seconds_stays():
    cost = RefinedCost(prior)
    for _ in range(400):
        cost.observe(4, 0, 2 * prior(4, 0))
    cost.replace_prior(lambda rows, kv_tokens: 2 * prior(rows, kv_tokens))
    assert not cost.contradicted
    for rows in (1, 4, 64):
        assert abs(cost(rows, 0) / (2 * prior(rows, 0)) - 1) < 0.01


def test_the_state_of_corrections_is_bounded():
    """Batches of any size are priced, and the largest share a bin."""
    cost = RefinedCost(prior)
    for rows in (1, 129, 1024, 5000, 1):
        for _ in range(60):
            cost.observe(rows, 0, 2 * prior(rows, 0))
        assert abs(cost(rows, 0) / prior(rows, 0) - 2) < 0.05
