"""A cost curve is corrected by measured step times."""

from streamserve.speculation.learned_cost import LIMIT, RefinedCost


def prior(query_tokens: int, kv_tokens: int) -> float:
    return 1.0 + query_tokens / 10


def test_without_observations_the_profile_stands():
    assert RefinedCost(prior)(10, 0) == 2.0


def test_observations_correct_their_token_counts_and_the_unobserved_ones():
    cost = RefinedCost(prior)
    for _ in range(100):
        cost.observe(10, 0, 4.0)
    assert abs(cost(10, 0) - 4.0) < 0.01
    assert abs(cost(20, 0) - 6.0) < 0.01, "without observations the same factor holds"
    for _ in range(50):
        cost.observe(20, 0, 5.0)
    assert abs(cost(20, 0) - 5.0) < 0.2
    assert abs(cost(10, 0) - 4.0) < 0.2, "the observations of this size are recent"


def test_old_observations_fade():
    """Old observations fade; otherwise one outlier at four tokens would prevent further trials of that size
    forever."""
    cost = RefinedCost(prior)
    for _ in range(20):
        cost.observe(1, 0, prior(1, 0))
    cost.observe(4, 0, 2.5 * prior(4, 0))
    assert cost(4, 0) > 1.5 * prior(4, 0)
    for _ in range(500):
        cost.observe(1, 0, prior(1, 0))
    assert cost(4, 0) < 1.05 * prior(4, 0)


def test_one_outlier_changes_little():
    cost = RefinedCost(prior)
    for _ in range(20):
        cost.observe(1, 0, prior(1, 0))
    cost.observe(1, 0, 1000.0)
    assert cost(1, 0) < prior(1, 0) * (1 + 0.1 * LIMIT)


def test_a_wrong_prior_at_one_batch_size_is_corrected_there_alone():
    """A wrong prior at one batch size is corrected only there. Plain steps of eight tokens were measured
    three times too slow; steps of seven and nine tokens correctly."""
    cost = RefinedCost(
        lambda query_tokens, kv_tokens: prior(query_tokens, kv_tokens) * (3.0 if query_tokens == 8 else 1.0)
    )
    for query_tokens in (7, 8, 9) * 5:
        cost.observe(query_tokens, 0, prior(query_tokens, 0))
    for query_tokens in (7, 8, 9):
        assert abs(cost(query_tokens, 0) / prior(query_tokens, 0) - 1) < 0.05


def test_a_batch_size_never_seen_costs_no_more_than_a_larger_one():
    """A batch size that never ran costs no more than a larger one. In the profile all steps of fewer than
    four tokens are three times too slow, and only larger ones ran."""
    cost = RefinedCost(
        lambda query_tokens, kv_tokens: prior(query_tokens, kv_tokens) * (3.0 if query_tokens < 4 else 1.0)
    )
    for _ in range(10):
        cost.observe(4, 0, prior(4, 0))
    assert cost(1, 0) <= prior(4, 0)


def test_a_batch_size_never_seen_costs_no_less_than_a_smaller_one():
    cost = RefinedCost(
        lambda query_tokens, kv_tokens: prior(query_tokens, kv_tokens) / (3.0 if query_tokens >= 12 else 1.0)
    )
    for _ in range(10):
        cost.observe(10, 0, prior(10, 0))
    assert cost(12, 0) >= prior(10, 0) * 0.999


def test_unobserved_batch_sizes_take_the_factors_of_the_nearest_observed_ones():
    cost = RefinedCost(prior)
    for _ in range(10):
        cost.observe(4, 0, 2 * prior(4, 0))
        cost.observe(16, 0, 3 * prior(16, 0))
    assert abs(cost(2, 0) / prior(2, 0) - 2) < 0.05
    assert 2 < cost(8, 0) / prior(8, 0) < 3
    assert abs(cost(2000, 0) / prior(2000, 0) - 3) < 0.05


def test_a_profile_that_steps_contradict_for_long_is_reported():
    accurate, slow, outliers, wrong_in_part = (RefinedCost(prior) for _ in range(4))
    for step in range(600):
        query_tokens = 1 + step % 8
        accurate.observe(query_tokens, 0, prior(query_tokens, 0) * (1.1 if step % 2 else 0.95))
        outliers.observe(query_tokens, 0, prior(query_tokens, 0) * (3.0 if step % 20 == 0 else 1.0))
        slow.observe(query_tokens, 0, 1.4 * prior(query_tokens, 0))
        wrong_in_part.observe(query_tokens, 0, prior(query_tokens, 0) * (2.0 if query_tokens < 5 else 1.0))
        if step == 100:
            assert not slow.contradicted, "not enough steps yet"
    assert not accurate.contradicted
    assert not outliers.contradicted
    assert slow.contradicted
    assert wrong_in_part.contradicted
    assert 1.3 < slow.disagreement < 1.5


def test_learned_step_times_survive_another_profile():
    cost = RefinedCost(prior)
    for _ in range(400):
        cost.observe(4, 0, 2 * prior(4, 0))
    cost.replace_prior(lambda query_tokens, kv_tokens: 2 * prior(query_tokens, kv_tokens))
    assert not cost.contradicted
    for query_tokens in (1, 4, 64):
        assert abs(cost(query_tokens, 0) / (2 * prior(query_tokens, 0)) - 1) < 0.01


def test_the_state_of_corrections_is_bounded():
    """The state of corrections is bounded: batches of any size have a cost, and the largest share a bin."""
    cost = RefinedCost(prior)
    for query_tokens in (1, 129, 1024, 5000, 1):
        for _ in range(60):
            cost.observe(query_tokens, 0, 2 * prior(query_tokens, 0))
        assert abs(cost(query_tokens, 0) / prior(query_tokens, 0) - 2) < 0.05
