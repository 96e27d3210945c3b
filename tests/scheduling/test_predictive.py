"""Predictive routing minimizes missed targets and completion times, by each worker's step costs."""

from collections import Counter

from msgspec.structs import replace

from streamserve.contracts.cost import WorkerCosts
from streamserve.scheduling.predictive import Predictive
from streamserve.scheduling.routing import IDLE_WORKER, Arrival, RouteCandidate
from tests.scheduling.candidates import IDLE, candidate


def test_equal_candidates_are_chosen_in_turn() -> None:
    chosen = Counter(Predictive()(Arrival(10), [candidate()] * 3, turn).chosen for turn in range(30))
    assert chosen == {0: 10, 1: 10, 2: 10}


def test_the_predictive_router_predicts_the_halves_of_uneven_pools_separately() -> None:
    prefills = [
        candidate(decode=IDLE_WORKER),
        candidate(cached=80, decode=IDLE_WORKER),
        candidate(timely_tokens=500, decode=IDLE_WORKER),
    ]
    decision = Predictive()(Arrival(100), prefills, 0)
    assert (decision.chosen, decision.reason) == (1, "fewest missed targets, then earliest completion")
    decodes = [replace(IDLE, decoding=8), replace(IDLE, decoding=1), replace(IDLE, blocks_live=95)]
    assert (
        Predictive()(Arrival(100), [RouteCandidate(IDLE_WORKER, decode) for decode in decodes], 0).chosen == 1
    )


def test_the_predictive_router_misses_the_fewest_targets() -> None:
    """The predictive router misses the fewest targets. The first candidate has the prompt cached, but many
    requests decode there; the second has to compute it."""
    busy = candidate(cached=500, decode=replace(IDLE, decoding=40, max_num_seqs=64))
    free = candidate(decode=replace(IDLE, decoding=0))
    router = Predictive(output=10)
    assert router(Arrival(500), [busy, free], 0).chosen == 0, "earliest completion"
    assert router(Arrival(500, tpot=0.02), [busy, free], 0).chosen == 1, "its TPOT holds only there"
    assert router(Arrival(500, ttft=0.1), [busy, free], 0).chosen == 0, "its TTFT holds only here"


def test_the_predictive_router_counts_queued_tokens_and_free_capacity() -> None:
    router = Predictive()
    assert router(Arrival(100), [candidate(queued=1, timely_tokens=4000), candidate(queued=3)], 0).chosen == 1
    assert router(Arrival(100), [candidate(blocks_live=99), candidate(timely_tokens=4000)], 0).chosen == 1
    busy_worker = replace(IDLE, decoding=8)
    taken = [
        candidate(decode=replace(busy_worker, incoming=2)),
        candidate(timely_tokens=4000, decode=busy_worker),
    ]
    assert router(Arrival(100), taken, 0).chosen == 1, "ten may run there"


def test_the_predictive_router_counts_computed_and_late_prompts() -> None:
    router = Predictive()
    waiting = [candidate(timely_tokens=1000), candidate(timely_tokens=1100, busy=0.9)]
    assert router(Arrival(100), waiting, 0).chosen == 1, "most of the prompt is computed by now"
    waiting = [candidate(timely_tokens=1000), candidate(timely_tokens=5000, timely_for=0.5)]
    assert router(Arrival(100), waiting, 0).chosen == 1, "half a second from now the requests are late"
    late = [candidate(queued_tokens=1000, timely_tokens=1000), candidate(queued_tokens=5000)]
    assert router(Arrival(100, ttft=0.5), late, 0).chosen == 1, "no request there can still be in time"


def test_a_speculation_speedup_attracts_requests() -> None:
    fast, slow = candidate(speedup=3.0), candidate()
    assert Predictive()(Arrival(100), [slow, fast], 0).chosen == 1


def test_each_worker_is_predicted_by_its_own_cost() -> None:
    twice = WorkerCosts(prefill=lambda tokens: tokens / 500, decode=lambda seqs, kv: 0.02 + 0.002 * seqs)
    assert Predictive()(Arrival(100), [candidate(costs=twice), candidate()], 0).chosen == 1


def test_flowguard_chooses_where_a_cost_is_unknown() -> None:
    candidate_lists = [candidate(), candidate(cached=90, costs=None)]
    decision = Predictive()(Arrival(100), candidate_lists, 0)
    assert decision.chosen == 1
    assert decision.reason == "a step cost is unknown: highest score"
