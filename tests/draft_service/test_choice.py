"""A sequence is assigned to the service that is expected to finish it first, and changes only for a
sufficient gain."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from streamserve.draft_service.target.choice import (
    EQUAL,
    MOVE_SHARE,
    PRIOR_ACCEPTED,
    MeasuredService,
    PlacedSequence,
    choose,
    expected_acceptance,
    seconds_at,
)

VERIFY = 0.02
SERVICE = MeasuredService(
    number=0, queue=0.0, round_trip=0.001, batch=0.01, trees=1.0, per_tree=0.004, read=1e-4, accepted=2.0
)
NEW = PlacedSequence(None, 100, 64.0)

services = st.builds(
    replace,
    st.just(SERVICE),
    queue=st.floats(0.0, 0.2),
    round_trip=st.floats(0.0, 0.1),
    batch=st.floats(0.001, 0.1),
    trees=st.floats(1.0, 8.0),
    per_tree=st.floats(0.0, 0.02),
    read=st.floats(1e-6, 1e-3),
    accepted=st.floats(0.0, 8.0),
    sequences=st.integers(0, 20),
    active=st.integers(0, 9),
)
several = st.lists(services, min_size=1, max_size=5).map(
    lambda found: [replace(service, number=n, rank=n) for n, service in enumerate(found)]
)
sequences = st.builds(
    PlacedSequence,
    st.one_of(st.none(), st.integers(0, 4)),
    st.integers(1, 4000),
    st.floats(1.0, 2000.0),
    st.floats(0.2, 4.0),
)


def pair(**other: float) -> list[MeasuredService]:
    return [SERVICE, replace(SERVICE, number=1, rank=1, **other)]  # type: ignore[arg-type]


@given(several, sequences)
def test_no_service_is_much_better_than_the_chosen_one(found, sequence):
    chosen = choose(found, sequence, VERIFY)
    seconds = [seconds_at(service, sequence, VERIFY) for service in found]
    margin = 1 / MOVE_SHARE if chosen == sequence.service else EQUAL
    assert seconds[chosen] <= margin * min(seconds) * (1 + 1e-9)


@given(several, sequences)
def test_once_moved_a_sequence_stays(found, sequence):
    chosen = choose(found, sequence, VERIFY)
    if chosen == sequence.service:
        return
    moved = [replace(s, sequences=s.sequences + (s.number == chosen)) for s in found]
    assert choose(moved, replace(sequence, service=chosen), VERIFY) == chosen


@given(several, sequences, st.integers(0, 4), st.floats(0.001, 1.0))
def test_a_service_that_gets_worse_is_not_chosen_for_it(found, sequence, number, more):
    if number >= len(found) or choose(found, sequence, VERIFY) == number:
        return
    for worse in (
        replace(found[number], queue=found[number].queue + more),
        replace(found[number], round_trip=found[number].round_trip + more),
        replace(found[number], accepted=found[number].accepted / (1 + more)),
        replace(found[number], sequences=found[number].sequences + 3),
    ):
        changed = [*found[:number], worse, *found[number + 1 :]]
        assert choose(changed, sequence, VERIFY) != number


def test_queue_distance_acceptance_and_load_each_decide():
    for worse in (
        {"queue": 0.05}, {"round_trip": 0.05}, {"accepted": 0.5}, {"sequences": 9}, {"batch": 0.09},
        {"available_in": 30.0},
    ):  # fmt: skip
        assert choose(pair(**worse), NEW, VERIFY) == 0, worse
        swapped = [replace(SERVICE, **worse), replace(SERVICE, number=1, rank=1)]
        assert choose(swapped, NEW, VERIFY) == 1, worse


def test_distance_matters_more_for_a_sequence_whose_draft_tokens_are_seldom_accepted():
    near_or_good = pair(round_trip=0.02, accepted=5.0)
    assert choose(near_or_good, replace(NEW, ratio=1.5), VERIFY) == 1
    assert choose(near_or_good, replace(NEW, ratio=0.1), VERIFY) == 0


def test_a_move_must_earn_the_reading_of_its_prompt():
    faster = pair(batch=0.002, per_tree=0.0)
    faster[0] = replace(faster[0], batch=0.03)
    assert choose(faster, PlacedSequence(0, 100, 500.0), VERIFY) == 1
    assert choose(faster, PlacedSequence(0, 100_000, 500.0), VERIFY) == 0, (
        "reading the sequence again would take too long"
    )
    assert choose(faster, PlacedSequence(0, 2000, 4.0), VERIFY) == 0, "the sequence ends too soon to gain"


def test_equal_services_share_sequences_and_targets():
    found = pair()
    counts = [0, 0]
    for _ in range(20):
        number = choose(found, NEW, VERIFY)
        counts[number] += 1
        found[number] = replace(found[number], sequences=found[number].sequences + 1)
    assert counts == [10, 10]
    assert choose(pair(active=1)[::-1], NEW, VERIFY) == 0


def test_a_service_without_verified_trees_is_tried():
    assert expected_acceptance([(0.0, 0.0), (0.0, 0.0)]) == [PRIOR_ACCEPTED, PRIOR_ACCEPTED]
    known, unknown = expected_acceptance([(40.0, 80.0), (0.0, 0.0)])
    assert unknown > known
    known, tried = expected_acceptance([(40.0, 80.0), (20.0, 5.0)])
    assert tried < known
