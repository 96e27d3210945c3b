"""Routers: FlowGuard's arithmetic, who is passed over, and what the others choose."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamserve.scheduling.routing import (
    NOBODY,
    PRINTED_WEIGHTS,
    Arrival,
    ByClass,
    Costs,
    FlowGuard,
    Place,
    Predictive,
    RandomChoice,
    Router,
    WorkerLoad,
    cache_aware,
    least_loaded,
    parse_router,
    round_robin,
)

COSTS = Costs(prefill=lambda tokens: tokens / 1000, decode=lambda seqs, kv: 0.01 + 0.001 * seqs)
IDLE = WorkerLoad("w", max_num_seqs=10, blocks_total=100, costs=COSTS)


def place(cached: int = 0, decode: WorkerLoad | None = None, **load: float) -> Place:
    prefill = replace(IDLE, **load)
    return Place(prefill, prefill if decode is None else decode, cached)


loads = st.builds(
    WorkerLoad,
    st.just("w"),
    queued=st.integers(0, 20),
    queued_tokens=st.integers(0, 5000),
    timely_tokens=st.integers(0, 5000),
    busy=st.floats(0, 5),
    timely_for=st.floats(0, 5),
    coming=st.integers(0, 10),
    decoding=st.integers(0, 10),
    max_num_seqs=st.just(10),
    blocks_live=st.integers(0, 100),
    blocks_total=st.just(100),
    hit_rate=st.floats(0, 1),
    silence=st.floats(0, 5),
    costs=st.sampled_from((COSTS, COSTS, None)),
)
places = st.lists(st.builds(Place, loads, loads, st.integers(0, 100)), min_size=1, max_size=6)
routers: list[Router] = [
    FlowGuard(),
    FlowGuard(printed=True),
    round_robin,
    RandomChoice(3),
    least_loaded,
    cache_aware,
    Predictive(),
    ByClass((0.02, 0.05)),
]


@given(places, st.integers(0, 10**6), st.sampled_from(routers))
def test_every_router_chooses_one_of_the_places(found: list[Place], turn: int, router: Router) -> None:
    decision = router(Arrival(100, ttft=1.0, tpot=0.02), found, turn)
    assert 0 <= decision.chosen < len(found)
    assert len(decision.scores) == len(found)
    assert decision == router(Arrival(100, ttft=1.0, tpot=0.02), found, turn)


def test_the_score_is_the_papers() -> None:
    prefill = WorkerLoad("p", queued=2, max_num_seqs=10, blocks_live=10, blocks_total=100, hit_rate=0.9)
    decode = WorkerLoad("d", decoding=5, max_num_seqs=10, blocks_live=30, blocks_total=100)
    found = Place(prefill, decode, cached=50)
    assert FlowGuard(PRINTED_WEIGHTS).score(Arrival(100), found) == pytest.approx(
        0.4 * 0.5 + 0.1 * (1 - 0.3) + 0.3 * (1 - 0.2) + 0.2 * (1 - 0.5)
    )
    assert FlowGuard(PRINTED_WEIGHTS, printed=True).score(Arrival(100), found) == pytest.approx(
        0.4 * 0.9 + 0.1 * (1 - 0.3) + 0.3 * (1 - 0.2) + 0.2 * (1 - 0.5)
    )


def test_what_is_cached_there_wins_until_that_place_is_overloaded() -> None:
    assert FlowGuard()(Arrival(100), [place(), place(cached=90)], 0).chosen == 1
    busy = [place(queued=3), place(cached=90, queued=4)]
    assert FlowGuard()(Arrival(100), busy, 0).chosen == 1, "one more in the queue"
    assert FlowGuard()(Arrival(100), [place(), busy[1]], 0).chosen == 0, "four more"
    assert FlowGuard(PRINTED_WEIGHTS)(Arrival(100), [place(), busy[1]], 0).chosen == 1
    decision = FlowGuard(PRINTED_WEIGHTS)(Arrival(100), [place(), place(cached=90, queued=5)], 0)
    assert (decision.chosen, decision.scores[1]) == (0, None), "2 * 0.5 > 0.85"
    assert FlowGuard()(Arrival(100), [place(), place(cached=90, blocks_live=90)], 0).chosen == 0


def test_a_silent_place_is_passed_over_even_when_all_others_are_overloaded() -> None:
    silent, full = place(silence=9.0), place(queued=9)
    assert FlowGuard()(Arrival(100), [silent, full], 0).chosen == 1
    assert FlowGuard(printed=True)(Arrival(100), [silent, full], 0).chosen == 0, "as the paper has it"
    assert FlowGuard()(Arrival(100), [silent, silent], 1).chosen == 1, "better a silent one than none"


@given(places, st.integers(0, 100))
def test_flowguard_prefers_eligible_places(found: list[Place], turn: int) -> None:
    router = FlowGuard()
    decision = router(Arrival(100), found, turn)
    for one, score in zip(found, decision.scores, strict=True):
        over = one.memory + 2 * one.prefill.queue > router.overload or one.silence > router.stale
        assert score == (None if over else pytest.approx(router.score(Arrival(100), one)))
    if any(score is not None for score in decision.scores):
        assert decision.scores[decision.chosen] == max(s for s in decision.scores if s is not None)


def test_equal_places_take_turns() -> None:
    for router in (FlowGuard(), least_loaded, cache_aware, round_robin, Predictive()):
        chosen = Counter(router(Arrival(10), [place()] * 3, turn).chosen for turn in range(30))
        assert chosen == {0: 10, 1: 10, 2: 10}


def test_random_choice_is_even_and_repeatable() -> None:
    chosen = Counter(RandomChoice(1)(Arrival(10), [place()] * 2, turn).chosen for turn in range(1000))
    assert 400 < chosen[0] < 600


@pytest.mark.parametrize("weights", [(0.5, 0.5, 0.5, 0.5), (1.2, -0.2, 0.0, 0.0)])
def test_weights_that_are_no_weights_are_refused(weights: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        FlowGuard(weights)


def test_uneven_pools_choose_each_half_by_what_it_needs() -> None:
    prefills = [place(decode=IDLE), place(cached=80, decode=IDLE), place(cached=99, queued=9, decode=IDLE)]
    assert FlowGuard()(Arrival(100), prefills, 0).chosen == 1
    decodes = [replace(IDLE, decoding=8), replace(IDLE, decoding=1), replace(IDLE, blocks_live=95)]
    assert FlowGuard()(Arrival(100), [Place(IDLE, decode) for decode in decodes], 0).chosen == 1


def test_the_predictive_router_prices_the_halves_of_uneven_pools_by_themselves() -> None:
    prefills = [
        place(decode=NOBODY),
        place(cached=80, decode=NOBODY),
        place(timely_tokens=500, decode=NOBODY),
    ]
    decision = Predictive()(Arrival(100), prefills, 0)
    assert (decision.chosen, decision.reason) == (1, "fewest targets broken, then soonest done")
    decodes = [replace(IDLE, decoding=8), replace(IDLE, decoding=1), replace(IDLE, blocks_live=95)]
    assert Predictive()(Arrival(100), [Place(NOBODY, decode) for decode in decodes], 0).chosen == 1


def test_cache_aware_gives_up_the_cache_for_balance() -> None:
    assert cache_aware(Arrival(100), [place(), place(cached=90, queued=5)], 0).chosen == 1
    assert cache_aware(Arrival(100), [place(), place(cached=90, queued=50)], 0).chosen == 0


def test_the_predictive_router_breaks_the_fewest_targets() -> None:
    """The first place has the prompt cached but many decode there; the second must compute it."""
    busy = place(cached=500, decode=replace(IDLE, decoding=40, max_num_seqs=64))
    free = place(decode=replace(IDLE, decoding=0))
    router = Predictive(output=10)
    assert router(Arrival(500), [busy, free], 0).chosen == 0, "soonest done"
    assert router(Arrival(500, tpot=0.02), [busy, free], 0).chosen == 1, "its TPOT holds only there"
    assert router(Arrival(500, ttft=0.1), [busy, free], 0).chosen == 0, "its TTFT holds only here"


def test_the_predictive_router_counts_what_waits_and_what_does_not_fit() -> None:
    router = Predictive()
    assert router(Arrival(100), [place(queued=1, timely_tokens=4000), place(queued=3)], 0).chosen == 1
    assert router(Arrival(100), [place(blocks_live=99), place(timely_tokens=4000)], 0).chosen == 1
    seats = replace(IDLE, decoding=8)
    taken = [place(decode=replace(seats, coming=2)), place(timely_tokens=4000, decode=seats)]
    assert router(Arrival(100), taken, 0).chosen == 1, "ten may run there"


def test_the_predictive_router_sees_what_is_done_and_what_will_be_put_off() -> None:
    router = Predictive()
    waiting = [place(timely_tokens=1000), place(timely_tokens=1100, busy=0.9)]
    assert router(Arrival(100), waiting, 0).chosen == 1, "most of it is computed by now"
    waiting = [place(timely_tokens=1000), place(timely_tokens=5000, timely_for=0.5)]
    assert router(Arrival(100), waiting, 0).chosen == 1, "half a second from now they are late"
    late = [place(queued_tokens=1000, timely_tokens=1000), place(queued_tokens=5000)]
    assert router(Arrival(100, ttft=0.5), late, 0).chosen == 1, "nobody there can still be in time"


def test_speculation_that_works_somewhere_draws_requests_there() -> None:
    fast, slow = place(speedup=3.0), place()
    assert Predictive()(Arrival(100), [slow, fast], 0).chosen == 1


def test_each_worker_is_priced_by_its_own_cost() -> None:
    twice = Costs(prefill=lambda tokens: tokens / 500, decode=lambda seqs, kv: 0.02 + 0.002 * seqs)
    assert Predictive()(Arrival(100), [place(costs=twice), place()], 0).chosen == 1


def test_where_a_cost_is_not_known_flowguard_chooses() -> None:
    places = [place(), place(cached=90, costs=None)]
    decision = Predictive()(Arrival(100), places, 0)
    assert decision.chosen == 1
    assert decision.reason == "a cost is not known: highest score"


def test_classes_of_targets_keep_to_their_own_pipelines() -> None:
    router, six = ByClass((0.02, 0.05)), [place(), place(), place(), place(queued=9), place(), place()]
    for tpot, own in ((0.01, 0), (0.02, 0), (0.021, 1), (0.05, 1), (9.0, 2), (None, 2)):
        chosen = {router(Arrival(10, tpot=tpot), six, turn).chosen for turn in range(6)}
        assert chosen == ({0} if own == 0 else {own, own + 3}), "the fewest requests of its places"
    two = [router(Arrival(10, tpot=tpot), six[:2], 0).chosen for tpot in (0.01, 0.03, None)]
    assert two == [0, 1, 0], "with fewer places than classes, some share"


def test_routers_are_read_by_name_and_flowguard_with_its_weights() -> None:
    assert parse_router("predictive") == Predictive()
    assert parse_router("classes:20,50") == ByClass((0.02, 0.05))
    assert parse_router("flowguard:0.7,0.1,0.1,0.1") == FlowGuard((0.7, 0.1, 0.1, 0.1))
    assert parse_router("flowguard:0.7,0.1,0.1,0.1:0.5") == FlowGuard((0.7, 0.1, 0.1, 0.1), overload=0.5)
    assert parse_router("flowguard-printed:0.7,0.1,0.1,0.1") == FlowGuard((0.7, 0.1, 0.1, 0.1), printed=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic", "none of flowguard"),
        ("random:1", "only flowguard"),
        ("classes", "ends in milliseconds"),
        ("classes:20:50", "ends in milliseconds"),
        ("classes:50,20", "ends in milliseconds"),
        ("classes:0,20", "ends in milliseconds"),
        ("classes:nan", "ends in milliseconds"),
        ("flowguard:1,2", "four weights"),
        ("flowguard:a,b,c,d", "numbers"),
        ("flowguard:0.5,0.5,0.5,0.5", "sum to 1"),
        ("flowguard:0.4,0.1,0.3,0.2:0", "positive"),
        ("flowguard:0.4,0.1,0.3,0.2:1:1", "only flowguard"),
    ],
)
def test_a_router_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_router(text)
