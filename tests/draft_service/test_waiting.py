"""A target waits for trees for as long as waiting pays, and does not wait at all where it never pays."""

from streamserve.draft_service.target.waiting import RETRY_STEPS, Waiting


def known(plain: float, gain: int) -> Waiting:
    waiting = Waiting()
    for _ in range(200):
        waiting.worked(plain, trees=False)
        waiting.gained(gain)
    return waiting


def test_it_pays_to_wait_as_long_as_the_tokens_would_take_by_plain_steps():
    assert abs(known(0.02, 3).max_wait - 0.06) < 1e-3
    assert known(0.02, 0).max_wait < 1e-3


def test_slow_answers_are_not_waited_for_except_for_retries():
    waiting = known(0.02, 3)
    limits = [waiting.limit(0, 0.5) for _ in range(2 * RETRY_STEPS)]
    assert [limit > 0 for limit in limits].count(True) == 2
    assert waiting.limit(0, 0.01) == waiting.max_wait
    assert waiting.limit(1, 0.5) == 0.0, "other services are not affected by the retry time"


def test_gaps_with_other_steps_count_little():
    waiting = known(0.02, 3)
    waiting.worked(0.9, trees=False)
    waiting.worked(100.0, trees=False)
    assert waiting.plain.value < 0.03
