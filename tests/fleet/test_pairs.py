"""Transfer reservations of stream pairs are opened, used, refused, and closed when either worker dies."""

import pytest
from msgspec.structs import replace

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import (
    Close,
    Command,
    Kill,
    Open,
    Refuse,
    Send,
    WorkerDead,
    WorkerLost,
    WorkerMessage,
)
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.report_totals import total
from streamserve.fleet.requests import Suspicion
from streamserve.fleet.worker_state import pairs
from streamserve.protocol.messages import (
    Admitted,
    Cancel,
    Event,
    Events,
    Failed,
    Pushed,
    Reserved,
    Submit,
    Token,
    Transfers,
    TransferUpdate,
)
from streamserve.protocol.reports import TransferReport
from streamserve.protocol.sampling import SamplingParams
from streamserve.protocol.transfers import Join, Push, Release
from tests.api.reports import REPORT
from tests.fleet.fakes import READY
from tests.fleet.pair_fakes import OPEN, D, P, reservation


def started() -> tuple[Fleet, int]:
    """Return a pair with one request whose first chunk is planned, and the request's attempt."""
    fleet = Fleet(FleetConfig(topology=pairs(1)))
    fleet.start(0.0)
    for worker in (P, D):
        assert fleet.handle(WorkerMessage(worker, 1, READY), 0.0) == []
    (submit,) = sent(fleet.handle(OPEN, 0.0), P)
    assert isinstance(submit, Submit)
    assert submit.phase == "prefill"
    (reserve,) = sent(send_events(fleet, P, Admitted("r", submit.attempt, 0, 0)), D)
    assert isinstance(reserve, Submit)
    assert reserve.phase == "decode"
    return fleet, submit.attempt


def sent(commands: list[Command], worker: str) -> list[object]:
    return [c.message for c in commands if isinstance(c, Send) and c.worker == worker]


def send_events(fleet: Fleet, worker: str, *events: Event, incarnation: int = 1) -> list[Command]:
    return fleet.handle(WorkerMessage(worker, incarnation, Events(list(events))), 1.0)


def send_updates(fleet: Fleet, worker: str, *updates: TransferUpdate, incarnation: int = 1) -> list[Command]:
    return fleet.handle(WorkerMessage(worker, incarnation, Transfers(list(updates))), 1.0)


def test_a_pair_whose_half_finds_the_files_replaced_serves_the_new_model_together() -> None:
    """If one half of a pair finds the model's files replaced, both halves serve the new model, since the
    other half cannot serve alone. The answer that has begun ends; the next answer is by the new model."""
    fleet, attempt = started()
    send_events(fleet, P, Token("r", attempt, 0, 0, 7))
    fleet.handle(replace_id(OPEN, "unanswered"), 1.0)
    new = replace(READY, model=replace(READY.model, fingerprint="new"))
    misfit = Failed("it is another model", 2, misfit=True)
    fleet.handle(WorkerLost(P, 1, "killed", frozenset(), ending="outside"), 2.0)
    for incarnation in (2, 3):
        assert not kills(fleet.handle(WorkerMessage(P, incarnation, misfit), 3.0)), (
            "the blocks may be copied now"
        )
        fleet.handle(WorkerLost(P, incarnation, "exit status 2", frozenset()), 3.0)
    assert kills(fleet.handle(WorkerMessage(P, 4, misfit), 4.0)) == [D]
    fleet.handle(WorkerLost(P, 4, "exit status 2", frozenset()), 4.0)
    fleet.handle(WorkerLost(D, 1, "its process ended with SIGKILL", ending="unclear"), 4.0)
    assert fleet.requests["unanswered"].suspicion == Suspicion()
    assert fleet.supervisor.expected(P) == ""
    refuse, *_ = fleet.handle(WorkerMessage(P, 5, new), 9.0)
    assert isinstance(refuse, Refuse)
    assert (refuse.request, refuse.error.status) == ("r", 503)
    (submit,) = sent(fleet.handle(WorkerMessage(D, 2, new), 9.0), P)
    assert isinstance(submit, Submit)
    assert submit.request == "unanswered"
    assert fleet.health() == (True, "ready")
    assert fleet.availability.missing() == ""


def replace_id(request: Open, name: str) -> Open:
    return replace(request, request=name)


def kills(commands: list[Command]) -> list[str]:
    return [command.worker for command in commands if isinstance(command, Kill)]


def test_a_reservation_goes_to_the_writer_and_arrived_kv_joins() -> None:
    fleet, attempt = started()
    mine = reservation(attempt)
    assert send_updates(fleet, D, Reserved("r", attempt, mine)) == [Send(P, Push(mine))]
    send_events(fleet, P, Token("r", attempt, 0, 0, 7))
    assert send_updates(fleet, P, Pushed("r", attempt, mine.id, sent=8)) == [
        Send(D, Join("r", attempt, mine.id, {0: [7]}, {0: 1.0}))
    ]
    assert not len(fleet.transfers.reservations)
    assert not fleet.workers[P].prompts
    assert fleet.workers[D].decoding == {"r"}


def test_a_repeated_reservation_changes_nothing() -> None:
    fleet, attempt = started()
    mine = reservation(attempt)
    send_updates(fleet, D, Reserved("r", attempt, mine))
    send_events(fleet, P, Token("r", attempt, 0, 0, 7))
    send_updates(fleet, P, Pushed("r", attempt, mine.id))
    assert send_updates(fleet, P, Pushed("r", attempt, mine.id)) == []
    assert fleet.requests["r"].attempt == attempt


def test_a_reservation_that_is_not_needed_is_released() -> None:
    fleet, attempt = started()
    stale, foreign = reservation(attempt + 5), reservation(attempt, request="other", id="x")
    assert send_updates(fleet, D, Reserved("r", attempt + 5, stale)) == [Send(D, Release(stale.id))]
    assert send_updates(fleet, D, Reserved("other", attempt, foreign)) == [Send(D, Release("x"))]
    assert not len(fleet.transfers.reservations)


def test_only_the_writer_can_close_a_reservation() -> None:
    fleet, attempt = started()
    mine = reservation(attempt)
    send_updates(fleet, D, Reserved("r", attempt, mine))
    send_events(fleet, P, Token("r", attempt, 0, 0, 7))
    assert send_updates(fleet, D, Pushed("r", attempt, mine.id)) == []
    assert len(fleet.transfers.reservations) == 1
    assert not fleet.workers[P].prompts


@pytest.mark.parametrize(
    "updates",
    [
        lambda attempt, id: Pushed("r", attempt, "forged", "the request is not here"),
        lambda attempt, id: Pushed("r", attempt - 1, id, "the request is not here"),
        lambda attempt, id: Pushed("other", attempt, id),
        lambda attempt, id: Pushed("r", attempt, id, "the reservation's blocks do not fit"),
    ],
    ids=["forged", "stale", "foreign", "truncated"],
)
def test_updates_that_contradict_the_reservations_restart_the_request(updates) -> None:
    fleet, attempt = started()
    mine = reservation(attempt)
    send_updates(fleet, D, Reserved("r", attempt, mine))
    send_events(fleet, P, Token("r", attempt, 0, 0, 7))
    commands = send_updates(fleet, P, updates(attempt, mine.id))
    assert not [m for m in sent(commands, D) if isinstance(m, Join)]
    again = next(m for m in sent(commands, P) if isinstance(m, Submit))
    assert again.attempt != attempt
    assert again.outputs == {0: [7]}


def test_a_reservation_for_another_request_is_released() -> None:
    fleet, attempt = started()
    foreign = reservation(attempt, request="other")
    assert send_updates(fleet, D, Reserved("r", attempt, foreign)) == [Send(D, Release(foreign.id))]
    mine = reservation(attempt)
    send_updates(fleet, D, Reserved("r", attempt, mine))
    assert send_updates(fleet, D, Reserved("r", attempt, mine)) == [], "it is being written to"


def test_kv_that_did_not_arrive_is_recomputed() -> None:
    fleet, attempt = started()
    mine = reservation(attempt)
    send_updates(fleet, D, Reserved("r", attempt, mine))
    send_events(fleet, P, Token("r", attempt, 0, 0, 7))
    commands = send_updates(fleet, P, Pushed("r", attempt, mine.id, "the wire was cut", doubtful=True))
    assert Send(D, Release(mine.id, doubtful=True)) in commands
    assert Send(D, Cancel("r")) in commands
    again = next(m for m in sent(commands, P) if isinstance(m, Submit))
    assert again.attempt != attempt
    assert again.outputs == {0: [7]}, "the attempt starts after the tokens that the client has"


def test_blocks_stay_reserved_until_the_writer_of_a_cancelled_request_is_done() -> None:
    fleet, attempt = started()
    mine = reservation(attempt)
    send_updates(fleet, D, Reserved("r", attempt, mine))
    commands = fleet.handle(Close("r"), 1.0)
    assert [c.message for c in commands if isinstance(c, Send)] == [Cancel("r"), Cancel("r")]
    assert len(fleet.transfers.reservations) == 1
    assert send_updates(fleet, P, Pushed("r", attempt, mine.id, "went away")) == [Send(D, Release(mine.id))]
    assert not len(fleet.transfers.reservations)


def test_reservations_of_a_dead_writer_are_released() -> None:
    fleet, attempt = started()
    mine = reservation(attempt)
    send_updates(fleet, D, Reserved("r", attempt, mine))
    commands = fleet.handle(WorkerLost(P, 1, "killed"), 2.0)
    assert Send(D, Release(mine.id, doubtful=True)) in commands, "its writes may still be in flight"
    assert Send(D, Cancel("r")) in commands
    assert not any(isinstance(command, Refuse) for command in commands)
    assert fleet.requests["r"].worker is None, "the request waits for the pair to return"


def test_after_the_transfer_the_death_of_the_prefill_worker_has_no_effect() -> None:
    fleet, attempt = started()
    mine = reservation(attempt)
    send_updates(fleet, D, Reserved("r", attempt, mine))
    send_events(fleet, P, Token("r", attempt, 0, 0, 7))
    send_updates(fleet, P, Pushed("r", attempt, mine.id))
    fleet.handle(WorkerLost(P, 1, "killed"), 2.0)
    assert fleet.requests["r"].attempt == attempt
    send_events(fleet, D, Token("r", attempt, 0, 1, 8, finish="stop"))
    assert not fleet.requests


def test_an_answer_of_one_token_is_not_transferred() -> None:
    fleet, _ = started()
    (submit,) = sent(fleet.handle(Open("s", [4], SamplingParams(seed=1, max_tokens=1)), 0.0), P)
    assert isinstance(submit, Submit)
    assert submit.phase == "both"


def test_a_worker_of_another_model_is_refused_with_both_values() -> None:
    fleet = Fleet(FleetConfig(topology=pairs(1)))
    fleet.start(0.0)
    fleet.handle(WorkerMessage(P, 1, READY), 0.0)
    fleet.handle(WorkerMessage(D, 1, replace(READY, block_size=8)), 0.0)
    ready, why = fleet.health()
    assert not ready
    assert f"{READY.model.kv_name}/8/1" in why
    assert f"{READY.model.kv_name}/4/1" in why


def test_reports_of_several_workers_add_up() -> None:
    still, moved = replace(REPORT, transfer=None), replace(REPORT, transfer=TransferReport(sent_bytes=5))
    both = total([still, moved])
    assert both is not None
    assert both.running == 2 * REPORT.running
    assert both.step_seconds == 2 * REPORT.step_seconds
    assert both.transfer == TransferReport(sent_bytes=5)
    assert total([]) is None


def test_blocks_of_a_lost_writer_stay_closed_until_it_is_dead() -> None:
    """Blocks of a lost writer stay closed until it is dead. It may still write, as its machine cannot be
    reached; the end of another incarnation proves nothing."""
    fleet, attempt = started()
    mine = reservation(attempt)
    send_updates(fleet, D, Reserved("r", attempt, mine))
    lost = fleet.handle(WorkerLost(P, 1, "its machine has not been heard", frozenset(), dead=False), 2.0)
    assert not any(isinstance(message, Release) for message in sent(lost, D))
    assert Cancel("r") in sent(lost, D), "the request itself moves at once"
    assert len(fleet.transfers.reservations) == 1
    assert send_updates(fleet, P, Pushed("r", attempt, mine.id)) == [], (
        "messages of the lost worker are ignored"
    )
    assert fleet.handle(WorkerDead(P, 2), 3.0) == []
    assert fleet.handle(WorkerDead(P, 1), 4.0) == [Send(D, Release(mine.id, doubtful=True))]
    assert fleet.handle(WorkerDead(P, 1), 5.0) == []
    assert not len(fleet.transfers.reservations)


def test_an_owner_that_is_gone_is_not_told_of_a_dead_writer() -> None:
    fleet, attempt = started()
    send_updates(fleet, D, Reserved("r", attempt, reservation(attempt)))
    fleet.handle(WorkerLost(P, 1, "its machine has not been heard", frozenset(), dead=False), 2.0)
    fleet.handle(WorkerLost(D, 1, "killed", frozenset()), 3.0)
    assert fleet.handle(WorkerDead(P, 1), 4.0) == []
    assert not len(fleet.transfers.reservations)
