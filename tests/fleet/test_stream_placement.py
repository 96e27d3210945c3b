"""Prompt streams in the fleet: placed by content, no load while idle, moved at their end."""

from streamserve.baselines.routers import ROUTERS
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Command, Edit, Open, Send, WorkerLost, WorkerMessage
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.worker_state import costs_of, pairs, unified
from streamserve.protocol.messages import Events, Progress, Submit
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.scheduling.routing import Arrival, Decision, RouteCandidate
from tests.fleet.test_fleet import READY
from tests.simulate.test_workers import CURVE

PARAMS = SamplingParams(seed=1, max_tokens=9, slo=Slo(ttft_ms=500.0))
STREAM = Open("s", [], PARAMS, open=True)


def started(config: FleetConfig) -> Fleet:
    fleet = Fleet(config)
    fleet.start(0.0)
    for worker in config.topology.names:
        fleet.handle(WorkerMessage(worker, 1, READY), 0.0)
    return fleet


def submitted(commands: list[Command]) -> list[tuple[str, Submit]]:
    return [(c.worker, c.message) for c in commands if isinstance(c, Send) and isinstance(c.message, Submit)]


def computed(fleet: Fleet, version: int, count: int) -> list[Command]:
    request = fleet.requests["s"]
    progress = Progress("s", request.attempt, version, count, len(request.opened.prompt))
    return fleet.handle(WorkerMessage(request.worker or "", 1, Events([progress])), 1.0)


def test_a_stream_is_placed_when_it_has_content_before_its_tail() -> None:
    fleet = started(FleetConfig(pairs(1)))
    assert fleet.handle(STREAM, 0.0) == []
    assert fleet.handle(Edit("s", 1, 0, [7, 8], tail=2), 0.1) == []
    ((worker, submit),) = submitted(fleet.handle(Edit("s", 2, 0, [1, 2, 3, 7, 8], tail=2), 0.2))
    assert (worker, submit.prompt, submit.version, submit.open) == ("prefill-0", [1, 2, 3, 7, 8], 2, True)


def test_a_stream_that_is_finished_without_content_is_placed() -> None:
    fleet = started(FleetConfig(unified(1)))
    fleet.handle(STREAM, 0.0)
    ((_, submit),) = submitted(fleet.handle(Edit("s", 1, 0, [7, 8], finish=True), 3.0))
    assert (submit.open, submit.arrival) == (False, 3.0), "its deadline counts from the end"


def test_a_stream_is_load_only_while_it_has_tokens_to_compute() -> None:
    fleet = started(FleetConfig(pairs(1)))
    fleet.handle(STREAM, 0.0)
    fleet.handle(Edit("s", 1, 0, list(range(10)), tail=2), 0.1)
    worker = fleet.workers["prefill-0"]
    load = worker.load("prefill-0", 0.2)
    assert (load.queued, load.queued_tokens, load.timely_tokens) == (1, 8, 0)
    computed(fleet, 1, 8)
    assert worker.load("prefill-0", 0.3).queued == 0, "idle"
    assert not fleet.workers["decode-0"].incoming
    fleet.handle(Edit("s", 2, 8, [50], finish=True), 5.0)
    (queued,) = worker.prefilling.values()
    assert (queued.tokens, queued.deadline) == (1, 5.5)
    assert fleet.workers["decode-0"].incoming == {"s"}


def test_computed_blocks_are_pushed_and_an_edit_pushes_again() -> None:
    fleet = started(FleetConfig(pairs(1)))
    fleet.handle(STREAM, 0.0)
    fleet.handle(Edit("s", 1, 0, list(range(30))), 0.1)
    assert submitted(computed(fleet, 1, 15)) == [], "three blocks are too few"
    ((worker, copy),) = submitted(computed(fleet, 1, 22))
    assert (worker, copy.phase, copy.prompt) == ("decode-0", "decode", list(range(20)))
    assert submitted(computed(fleet, 1, 29)) == [], "one at a time"
    fleet.handle(WorkerLost("decode-0", 1, "killed"), 1.0)
    assert fleet.requests["s"].worker == "prefill-0", "a stream that arrives does not depend on it"


def test_a_stream_moves_at_its_end_where_less_is_left_before_it() -> None:
    fleet = started(FleetConfig(unified(2)))
    fleet.handle(STREAM, 0.0)
    fleet.handle(Edit("s", 1, 0, list(range(8))), 0.1)
    first = fleet.requests["s"].worker
    assert first is not None
    computed(fleet, 1, 7)
    others = [Open(f"r{n}", [n] * 40, SamplingParams(seed=1, max_tokens=9)) for n in range(6)]
    for other in others:
        fleet.handle(other, 0.2)
    for name in [other.request for other in others if fleet.requests[other.request].worker != first]:
        fleet.abandon(name, ValueError())  # type: ignore[arg-type]
    ((worker, submit),) = submitted(fleet.handle(Edit("s", 2, 8, [50], finish=True), 0.3))
    assert worker != first
    assert submit.prompt == [*range(8), 50]
    assert fleet.dispatcher.rerouted == 1


def test_a_stream_stays_where_a_move_would_cost_more() -> None:
    fleet = started(FleetConfig(unified(2), router=ROUTERS["round-robin"]))
    fleet.handle(STREAM, 0.0)
    fleet.handle(Edit("s", 1, 0, list(range(40))), 0.1)
    first = fleet.requests["s"].worker
    computed(fleet, 1, 39)
    assert submitted(fleet.handle(Edit("s", 2, 40, [50], finish=True), 0.3)) == []
    assert (fleet.requests["s"].worker, fleet.dispatcher.rerouted) == (first, 0)


def test_seconds_of_one_worker_are_not_compared_with_tokens_of_another() -> None:
    """Step costs are known of one worker only; there the whole answer is predicted in parts of a second."""
    fleet = started(FleetConfig(unified(2), router=ROUTERS["round-robin"]))
    fleet.handle(STREAM, 0.0)
    fleet.handle(Edit("s", 1, 0, list(range(40))), 0.1)
    first = fleet.requests["s"].worker
    (other,) = set(fleet.workers) - {first}
    fleet.workers[other].costs = costs_of(CURVE, 4)
    computed(fleet, 1, 39)
    assert submitted(fleet.handle(Edit("s", 2, 40, [50], finish=True), 0.3)) == []
    assert fleet.requests["s"].worker == first


def test_the_router_is_told_how_long_the_prompt_may_become() -> None:
    seen: list[int] = []

    def router(arrival: Arrival, candidates: list[RouteCandidate], turn: int) -> Decision:
        seen.append(arrival.prompt_tokens)
        return Decision(0, (None,) * len(candidates), "first")

    fleet = started(FleetConfig(unified(2), router=router))  # type: ignore[arg-type]
    fleet.handle(Open("s", [1, 2], PARAMS, open=True, expected_tokens=500), 0.0)
    fleet.handle(Edit("s", 1, 2, [3], finish=True), 0.1)
    assert seen == [500, 3]
