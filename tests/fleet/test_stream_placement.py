"""Prompt streams are placed by content, count as no load while idle, and may move when they finish."""

import pytest

from streamserve.baselines.routers import ROUTERS
from streamserve.contracts.cost import worker_costs
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import ClientEdit, Close, Command, Open, Send, Tick, WorkerLost, WorkerMessage
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.request_status import RequestStatus
from streamserve.fleet.requests import OpenRequest
from streamserve.fleet.view import router_view
from streamserve.fleet.worker_state import pairs, pools, unified
from streamserve.protocol.messages import Cancel, Events, Progress, RequestKind, Submit
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.scheduling.routing import Arrival, Decision, RouteCandidate
from tests.fleet.fakes import READY
from tests.simulate.curves import CURVE

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
    assert fleet.handle(ClientEdit("s", 1, 0, [7, 8], tail=2), 0.1) == []
    ((worker, submit),) = submitted(fleet.handle(ClientEdit("s", 2, 0, [1, 2, 3, 7, 8], tail=2), 0.2))
    assert (worker, submit.prompt, submit.version, submit.open) == ("prefill-0", [1, 2, 3, 7, 8], 2, True)


def test_a_stream_that_is_finished_without_content_is_placed() -> None:
    fleet = started(FleetConfig(unified(1)))
    fleet.handle(STREAM, 0.0)
    ((_, submit),) = submitted(fleet.handle(ClientEdit("s", 1, 0, [7, 8], finish=True), 3.0))
    assert (submit.open, submit.arrival) == (False, 3.0), "the deadline counts from the end of the prompt"


def test_a_stream_is_load_only_while_it_has_tokens_to_compute() -> None:
    fleet = started(FleetConfig(pairs(1)))
    fleet.handle(STREAM, 0.0)
    fleet.handle(ClientEdit("s", 1, 0, list(range(10)), tail=2), 0.1)
    worker = fleet.workers["prefill-0"]
    load = worker.load("prefill-0", 0.2)
    assert (load.queued, load.queued_tokens, load.timely_tokens) == (1, 8, 0)
    computed(fleet, 1, 8)
    assert worker.load("prefill-0", 0.3).queued == 0, "idle"
    assert not fleet.workers["decode-0"].incoming
    fleet.handle(ClientEdit("s", 2, 8, [50], finish=True), 5.0)
    assert (len(worker.prompts), worker.prompts.timely(5.0)) == (1, (1, 5.5))
    assert fleet.workers["decode-0"].incoming == {"s"}


def test_computed_blocks_are_pushed_and_an_edit_pushes_again() -> None:
    fleet = started(FleetConfig(pairs(1)))
    fleet.handle(STREAM, 0.0)
    fleet.handle(ClientEdit("s", 1, 0, list(range(30))), 0.1)
    assert submitted(computed(fleet, 1, 15)) == [], "three blocks are too few"
    ((worker, copy),) = submitted(computed(fleet, 1, 22))
    assert (worker, copy.phase, copy.prompt) == ("decode-0", "decode", list(range(20)))
    assert submitted(computed(fleet, 1, 29)) == [], "one push at a time"
    fleet.handle(WorkerLost("decode-0", 1, "killed"), 1.0)
    assert fleet.requests["s"].worker == "prefill-0", "a stream that arrives does not depend on it"


def test_a_stream_moves_at_its_end_where_less_is_left_before_it() -> None:
    fleet = started(FleetConfig(unified(2)))
    fleet.handle(STREAM, 0.0)
    fleet.handle(ClientEdit("s", 1, 0, list(range(8))), 0.1)
    first = fleet.requests["s"].worker
    assert first is not None
    computed(fleet, 1, 7)
    others = [Open(f"r{n}", [n] * 40, SamplingParams(seed=1, max_tokens=9)) for n in range(6)]
    for other in others:
        fleet.handle(other, 0.2)
    for name in [other.request for other in others if fleet.requests[other.request].worker != first]:
        fleet.abandon(name, ValueError())  # type: ignore[arg-type]
    ((worker, submit),) = submitted(fleet.handle(ClientEdit("s", 2, 8, [50], finish=True), 0.3))
    assert worker != first
    assert submit.prompt == [*range(8), 50]
    assert fleet.dispatcher.rerouted == 1


def test_a_stream_stays_where_a_move_would_cost_more() -> None:
    fleet = started(FleetConfig(unified(2), router=ROUTERS["round-robin"]))
    fleet.handle(STREAM, 0.0)
    fleet.handle(ClientEdit("s", 1, 0, list(range(40))), 0.1)
    first = fleet.requests["s"].worker
    computed(fleet, 1, 39)
    assert submitted(fleet.handle(ClientEdit("s", 2, 40, [50], finish=True), 0.3)) == []
    assert (fleet.requests["s"].worker, fleet.dispatcher.rerouted) == (first, 0)
    latest, placed = router_view(fleet, "round-robin", (), 1.0).decisions
    (other,) = set(fleet.workers) - {first}
    assert fleet.placement.recent[-1].decision.chosen == list(fleet.workers).index(other), (
        "chosen by the router"
    )
    assert (latest.request, latest.chosen) == ("s", first), "the decision that was applied"
    assert latest.reason.startswith("stays")
    assert (placed.chosen, placed.reason) != (latest.chosen, latest.reason)


def test_both_steps_of_a_decision_among_pools_show_where_a_stream_stays() -> None:
    fleet = started(FleetConfig(pools(2, 3), router=ROUTERS["round-robin"]))
    fleet.handle(STREAM, 0.0)
    fleet.handle(ClientEdit("s", 1, 0, list(range(40))), 0.1)
    there = f"{fleet.requests['s'].worker} → {fleet.requests['s'].decode}"
    computed(fleet, 1, 39)
    assert submitted(fleet.handle(ClientEdit("s", 2, 40, [50], finish=True), 0.3)) == []
    latest = router_view(fleet, "round-robin", (), 1.0).decisions[:2]
    assert [decision.chosen for decision in latest] == [there, there]
    assert all(decision.reason.startswith("stays") for decision in latest)


def test_a_prompt_that_a_decode_worker_continues_is_shown_there() -> None:
    fleet = started(FleetConfig(pairs(1), continue_tokens=64))
    prompt = list(range(40))
    hashes = fleet.placement._hashes("decode-0", OpenRequest(Open("a", prompt, PARAMS), 0.0, 0), prompt)
    fleet.placement.view.learn("decode-0", hashes, 100)
    ((worker, _),) = submitted(fleet.handle(Open("a", prompt, PARAMS), 0.0))
    (decision,) = router_view(fleet, "flowguard", (), 1.0).decisions
    assert worker == decision.chosen == "decode-0"
    assert decision.reason == "it has the prefix cached"


def pushing() -> tuple[Fleet, str]:
    """Return a fleet in which a push of a stream has begun, and the push's name."""
    fleet = started(FleetConfig(pairs(2), router=ROUTERS["round-robin"]))
    fleet.handle(STREAM, 0.0)
    fleet.handle(ClientEdit("s", 1, 0, list(range(400))), 0.1)
    ((worker, submit),) = submitted(computed(fleet, 1, 300))
    assert worker == fleet.requests["s"].decode
    assert list(fleet.transfers.copies.open) == [submit.request]
    assert submit.kind is RequestKind.STREAM_PUSH
    return fleet, submit.request


def cancelled(commands: list[Command], name: str) -> list[str]:
    return [
        c.worker
        for c in commands
        if isinstance(c, Send) and isinstance(c.message, Cancel) and c.message.request == name
    ]


@pytest.mark.parametrize("written", [False, True])
def test_a_push_in_progress_is_dropped_when_its_stream_is_cancelled(written: bool) -> None:
    fleet, push = pushing()
    request = fleet.requests["s"]
    if written:
        fleet.transfers.copies.open[push].become(RequestStatus.RESERVED)
    both = sorted(request.workers)
    assert cancelled(fleet.handle(Close("s", None), 2.0), push) == both
    assert not fleet.transfers.copies.open
    assert not fleet.transfers.pushes._pushes
    assert cancelled(fleet.handle(Tick({}), 3.0), push) == [], "once"


def test_a_push_in_progress_is_dropped_when_its_stream_starts_over() -> None:
    fleet, push = pushing()
    writer, owner = fleet.requests["s"].worker, fleet.requests["s"].decode
    assert writer
    commands = fleet.handle(WorkerLost(writer, 1, "gone"), 2.0)
    assert cancelled(commands, push) == [owner]
    assert not fleet.transfers.pushes._pushes
    assert not fleet.transfers.copies.open


def test_a_push_in_progress_goes_on_while_its_stream_is_edited() -> None:
    fleet, push = pushing()
    assert cancelled(fleet.handle(ClientEdit("s", 2, 400, [1, 2, 3]), 2.0), push) == []
    assert list(fleet.transfers.copies.open) == [push]


def test_seconds_of_one_worker_are_not_compared_with_tokens_of_another() -> None:
    """Seconds of one worker are not compared with tokens of another: step costs are known for one worker
    only, which would answer within a fraction of a second."""
    fleet = started(FleetConfig(unified(2), router=ROUTERS["round-robin"]))
    fleet.handle(STREAM, 0.0)
    fleet.handle(ClientEdit("s", 1, 0, list(range(40))), 0.1)
    first = fleet.requests["s"].worker
    (other,) = set(fleet.workers) - {first}
    fleet.workers[other].costs = worker_costs(CURVE, 100, 4)
    computed(fleet, 1, 39)
    assert submitted(fleet.handle(ClientEdit("s", 2, 40, [50], finish=True), 0.3)) == []
    assert fleet.requests["s"].worker == first


def test_the_router_is_told_how_long_the_prompt_may_become() -> None:
    seen: list[int] = []

    def router(arrival: Arrival, candidates: list[RouteCandidate], turn: int) -> Decision:
        seen.append(arrival.prompt_tokens)
        return Decision(0, (None,) * len(candidates), "first")

    fleet = started(FleetConfig(unified(2), router=router))  # type: ignore[arg-type]
    fleet.handle(Open("s", [1, 2], PARAMS, open=True, expected_tokens=500), 0.0)
    fleet.handle(ClientEdit("s", 1, 2, [3], finish=True), 0.1)
    assert seen == [500, 3]
