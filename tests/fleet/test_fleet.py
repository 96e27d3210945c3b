"""The fleet decides correctly on each single event."""

import dataclasses

import msgspec
import pytest

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import (
    ClientEdit,
    Close,
    Command,
    Deliver,
    Heartbeat,
    Kill,
    Open,
    Refuse,
    Send,
    Start,
    Tick,
    WorkerLost,
    WorkerMessage,
)
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.worker_state import unified
from streamserve.protocol import messages
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import (
    Admitted,
    Cancel,
    Events,
    Failed,
    Finished,
    OutputWithdrawn,
    Pooled,
    Progress,
    PromptLogprob,
    PromptLogprobs,
    Submit,
    Token,
)  # fmt: skip
from streamserve.protocol.reports import IncidentReport
from streamserve.protocol.sampling import Pooling, SamplingParams
from tests.api.reports import REPORT
from tests.fleet.fakes import OPEN, READY, W, send_events, started, submitted


def token(attempt: int, index: int, choice: int = 0, finish=None) -> Token:
    return Token("r", attempt, choice, index, 7, finish=finish)


def test_a_next_attempt_knows_when_each_choice_had_its_first_token() -> None:
    fleet = started()
    fleet.handle(Open("r", [1], SamplingParams(n=2, seed=1, max_tokens=9)), 0.0)
    fleet.handle(WorkerMessage(W, 1, Events([token(0, 0)])), 2.0)
    fleet.handle(WorkerMessage(W, 1, Events([token(0, 1)])), 3.0)
    fleet.handle(WorkerLost(W, 1, "it died"), 4.0)
    again = submitted(fleet.handle(WorkerMessage(W, 2, READY), 5.0))
    assert again.outputs == {0: [7, 7], 1: []}
    assert again.began == {0: 2.0}


def test_requests_wait_until_a_worker_is_ready() -> None:
    fleet = Fleet(FleetConfig())
    assert fleet.start(0.0) == [Start(W, 1)]
    assert not fleet.health()[0]
    assert fleet.handle(OPEN, 0.0) == []
    assert submitted(fleet.handle(WorkerMessage(W, 1, READY), 5.0)).arrival == 0.0
    assert fleet.health() == (True, "ready")


def test_an_event_whose_handling_raised_leaves_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = started()
    with monkeypatch.context() as patch:
        patch.setattr(fleet.scaling, "sweep", lambda now: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fleet.handle(OPEN, 0.0)
    assert fleet.commands
    assert fleet.handle(Tick(), 0.0) == []
    assert fleet.abandon("another", RequestError("no")) == []


def test_tokens_are_passed_on_and_the_last_one_ends_the_request() -> None:
    fleet = started()
    attempt = submitted(fleet.handle(OPEN, 0.0)).attempt
    first, last = token(attempt, 0), token(attempt, 1, finish="stop")
    assert send_events(fleet, Admitted("r", attempt, 0, 2), first) == [
        Deliver("r", [Admitted("r", attempt, 0, 2), first], last=False)
    ]
    assert send_events(fleet, last) == [Deliver("r", [last], last=True)]
    assert not fleet.requests


def test_repeated_and_unknown_events_are_dropped() -> None:
    fleet = started()
    attempt = submitted(fleet.handle(OPEN, 0.0)).attempt
    send_events(fleet, token(attempt, 0))
    assert send_events(fleet, token(attempt, 0)) == []
    assert send_events(fleet, token(attempt + 5, 1)) == []
    assert send_events(fleet, Token("other", attempt, 0, 0, 7)) == []
    assert send_events(fleet, token(attempt, 1), incarnation=2) == []


def test_a_gap_ends_the_request_with_an_error() -> None:
    fleet = started()
    attempt = submitted(fleet.handle(OPEN, 0.0)).attempt
    send, refuse = send_events(fleet, token(attempt, 1))
    assert send == Send(W, Cancel("r"))
    assert isinstance(refuse, Refuse)
    assert refuse.error.status == 500
    assert not fleet.requests


def test_after_a_loss_the_next_attempt_carries_the_delivered_tokens() -> None:
    fleet = started()
    request = Open("r", [1, 2], SamplingParams(n=2, seed=1, max_tokens=9))
    attempt = submitted(fleet.handle(request, 0.0)).attempt
    send_events(fleet, token(attempt, 0), token(attempt, 1), token(attempt, 0, choice=1, finish="stop"))
    assert fleet.handle(WorkerLost(W, 1, "killed"), 2.0) == [Start(W, 2)]
    again = submitted(fleet.handle(WorkerMessage(W, 2, READY), 3.0))
    assert again.outputs == {0: [7, 7]}, "the finished choice is not generated again"
    assert again.attempt != attempt
    assert send_events(fleet, token(attempt, 2), incarnation=2) == [], (
        "events of the first attempt are dropped"
    )
    (delivered,) = send_events(fleet, token(again.attempt, 2, finish="length"), incarnation=2)
    assert delivered.last


def test_a_vector_is_delivered_once_also_after_a_loss() -> None:
    fleet = started()
    request = Open("r", [1, 2], SamplingParams(seed=1, max_tokens=0, pooling=Pooling()))
    attempt = submitted(fleet.handle(request, 0.0)).attempt
    fleet.handle(WorkerLost(W, 1, "killed"), 2.0)
    again = submitted(fleet.handle(WorkerMessage(W, 2, READY), 3.0))
    assert again.params.pooling == Pooling()
    late = Pooled("r", attempt, b"late"), Finished("r", attempt, 0, "stop")
    assert send_events(fleet, *late, incarnation=2) == []
    events = [Pooled("r", again.attempt, b"1234"), Finished("r", again.attempt, 0, "stop")]
    (delivered,) = send_events(fleet, *events, incarnation=2)
    assert (delivered.events, delivered.last) == (events, True)
    assert send_events(fleet, *events, incarnation=2) == []


def test_a_next_attempt_says_whether_a_worker_has_scheduled_the_request() -> None:
    fleet = started()
    waiting = submitted(fleet.handle(Open("r", [1, 2], SamplingParams(seed=1)), 0.0))
    fleet.handle(WorkerLost(W, 1, "killed"), 1.0)
    again = submitted(fleet.handle(WorkerMessage(W, 2, READY), 2.0))
    assert (waiting.rescheduled, again.rescheduled) == (False, False)
    send_events(fleet, Admitted("r", again.attempt, 0, cached=0), incarnation=2)
    fleet.handle(WorkerLost(W, 2, "killed"), 3.0)
    third = submitted(fleet.handle(WorkerMessage(W, 3, READY), 9.0))
    assert third.rescheduled


def test_recomputed_prompt_logprobs_are_delivered_once() -> None:
    fleet = started()
    request = Open("r", list(range(9)), SamplingParams(seed=1, prompt_logprobs=0))
    attempt = submitted(fleet.handle(request, 0.0)).attempt
    entries = [PromptLogprob(number, 0.0, 1, []) for number in range(1, 9)]
    send_events(fleet, PromptLogprobs("r", attempt, 1, entries[:3]))
    fleet.handle(WorkerLost(W, 1, "killed"), 2.0)
    attempt = submitted(fleet.handle(WorkerMessage(W, 2, READY), 3.0)).attempt
    (delivered,) = send_events(fleet, PromptLogprobs("r", attempt, 1, entries[:5]), incarnation=2)
    assert delivered.events == [PromptLogprobs("r", attempt, 4, entries[3:5])]
    (delivered,) = send_events(fleet, PromptLogprobs("r", attempt, 6, entries[5:]), incarnation=2)
    assert delivered.events[0].entries == entries[5:]


def test_a_request_that_repeatedly_crashes_its_worker_alone_is_refused() -> None:
    fleet = started(max_attempts=2)
    fleet.handle(OPEN, 0.0)
    fleet.handle(WorkerLost(W, 1, "killed"), 1.0)
    fleet.handle(WorkerMessage(W, 2, READY), 2.0)
    assert fleet.handle(WorkerLost(W, 2, "killed"), 3.0) == [Start(W, 3)], (
        "a suspected request does not delay others"
    )
    fleet.handle(WorkerMessage(W, 3, READY), 4.0)
    start, refuse = fleet.handle(WorkerLost(W, 3, "killed", frozenset((2,)), "run", "1.json"), 5.0)
    assert start == Start(W, 4)
    assert refuse.error.status == 500
    assert str(refuse.error) == (
        "request r ended its worker 2 times while it ran alone, in phase run: killed; crash report 1.json"
    )
    assert not len(fleet.quarantine)
    assert fleet.incidents() == IncidentReport(deaths=3, suspects=1, convicted=1)


def test_a_suspect_runs_without_speculation_and_shares_no_kv() -> None:
    fleet = started()
    before = submitted(fleet.handle(OPEN, 0.0))
    fleet.handle(WorkerLost(W, 1, "killed"), 1.0)
    again = submitted(fleet.handle(WorkerMessage(W, 2, READY), 2.0))
    assert before.params.speculation.enabled
    assert not again.params.speculation.enabled
    assert again.cache_salt != before.cache_salt


def test_requests_outside_of_the_lost_step_are_no_suspects() -> None:
    fleet = started()
    first, second = (submitted(fleet.handle(opened(name, 3), 0.0)) for name in ("a", "b"))
    fleet.handle(WorkerLost(W, 1, "killed", frozenset((first.attempt,)), "run"), 1.0)
    (trial,) = fleet.handle(WorkerMessage(W, 2, READY), 2.0)
    assert (trial.message.request, trial.message.params.speculation.enabled) == ("a", False)
    assert fleet.requests["b"].worker is None, "it waits until the suspect is cleared"
    send_events = [Token("a", trial.message.attempt, 0, index, 7) for index in range(2)]
    *_, other = fleet.handle(WorkerMessage(W, 2, Events(send_events)), 3.0)
    assert other.message.request == "b"
    assert other.message.params == second.params
    assert fleet.requests["b"].suspicion.strikes == 0


def test_a_trial_reserves_only_its_own_workers() -> None:
    fleet = started(topology=unified(2))
    sent = [send for n in range(4) for send in fleet.handle(opened(f"r{n}", 3), 0.0)]
    (victim,) = {send.worker for send in sent if send.message.request == "r0"}
    suspect = frozenset(s.message.attempt for s in sent if s.message.request == "r0")
    commands = fleet.handle(WorkerLost(victim, 1, "killed", suspect, "run"), 1.0)
    moved = [c for c in commands if isinstance(c, Send) and isinstance(c.message, Submit)]
    assert len(moved) == 1, "the other requests of the worker continue elsewhere"
    assert moved[0].worker != victim
    (later,) = fleet.handle(opened("later", 3), 1.5)
    assert later.worker != victim
    (trial,) = fleet.handle(WorkerMessage(victim, 2, READY), 2.0)
    assert (trial.worker, trial.message.request) == (victim, "r0")


def test_a_long_trial_is_suspended_for_waiting_requests() -> None:
    fleet = started()
    fleet.handle(OPEN, 0.0)
    fleet.handle(WorkerLost(W, 1, "killed"), 1.0)
    fleet.handle(WorkerMessage(W, 2, READY), 2.0)
    assert fleet.handle(opened("other", 3), 3.0) == []
    assert fleet.handle(Tick({(W, 2): Heartbeat(13.0)}), 11.0) == []
    cancel, submit = fleet.handle(Tick(), 13.0)
    assert cancel == Send(W, Cancel("r"))
    assert submit.message.request == "other"
    assert fleet.handle(Tick(), 20.0) == []
    cancel, submit = fleet.handle(Tick(), 25.0)
    assert (cancel, submit.message.request) == (Send(W, Cancel("other")), "r")


def test_repeated_losses_outside_of_steps_make_suspects() -> None:
    fleet = started()
    fleet.handle(OPEN, 0.0)
    for incarnation in range(1, 4):
        assert not len(fleet.quarantine)
        fleet.handle(WorkerLost(W, incarnation, "killed", frozenset()), 1.0)
        fleet.handle(WorkerMessage(W, incarnation + 1, READY), 1.0)
    assert len(fleet.quarantine) == 1


def test_requests_wait_for_a_worker_that_cannot_be_started_until_starts_keep_failing() -> None:
    fleet = started()
    fleet.handle(OPEN, 0.0)
    failed = WorkerLost(W, 2, "it could not be started: Too many open files", frozenset())
    assert fleet.handle(WorkerLost(W, 1, "killed", frozenset()), 10.0) == [Start(W, 2)]
    for incarnation in range(2, 5):
        (start,) = fleet.handle(dataclasses.replace(failed, incarnation=incarnation), 10.0)
        assert start.after > 0
    start, refuse = fleet.handle(dataclasses.replace(failed, incarnation=5), 10.0)
    assert start == Start(W, 6, 4.0)
    assert (refuse.error.status, refuse.error.retry_after) == (503, 4.0)
    assert "4 starts failed" in str(refuse.error)
    assert "Too many open files" in str(refuse.error)
    (refuse,) = fleet.handle(OPEN, 12.0)
    assert (refuse.error.status, refuse.error.retry_after) == (503, 2.0)
    fleet.handle(WorkerMessage(W, 6, READY), 14.0)
    submitted(fleet.handle(OPEN, 15.0))


def test_a_model_that_cannot_be_loaded_is_not_tried_again() -> None:
    fleet = Fleet(FleetConfig())
    fleet.start(0.0)
    fleet.handle(OPEN, 0.0)
    (refuse,) = fleet.handle(WorkerMessage(W, 1, Failed("config.json: no such thing", 2)), 1.0)
    assert "config.json" in str(refuse.error)
    assert fleet.handle(WorkerLost(W, 1, "exit status 2"), 1.1) == []


def test_requests_go_to_the_worker_with_the_fewest() -> None:
    fleet = started(topology=unified(2))
    workers = [
        command.worker
        for number in range(4)
        for command in fleet.handle(Open(f"r{number}", [1], SamplingParams(seed=1)), 0.0)
    ]
    assert sorted(workers) == ["unified-0"] * 2 + ["unified-1"] * 2


def test_the_other_worker_takes_over() -> None:
    fleet = started(topology=unified(2))
    (send,) = fleet.handle(OPEN, 0.0)
    other = {"unified-0": "unified-1", "unified-1": "unified-0"}[send.worker]
    start, again = fleet.handle(WorkerLost(send.worker, 1, "killed", frozenset()), 1.0)
    assert start == Start(send.worker, 2)
    assert again.worker == other


def test_closing_cancels_a_choice_or_all() -> None:
    fleet = started()
    fleet.handle(Open("r", [1], SamplingParams(n=2, seed=1)), 0.0)
    assert fleet.handle(Close("r", 0), 1.0) == [Send(W, Cancel("r", 0))]
    assert set(fleet.requests) == {"r"}
    assert fleet.handle(Close("r"), 1.0) == [Send(W, Cancel("r"))]
    assert not fleet.requests
    assert fleet.handle(Close("r"), 1.0) == []
    assert send_events(fleet, Finished("r", 0, 0, "abort")) == []


def test_a_request_id_in_use_is_refused() -> None:
    fleet = started()
    fleet.handle(OPEN, 0.0)
    (refuse,) = fleet.handle(OPEN, 0.0)
    assert refuse.error.status == 409
    assert set(fleet.requests) == {"r"}


def ticks(fleet: Fleet, since: float, now: float) -> list[Command]:
    """Let time pass without any message."""
    return [
        command
        for tick in range(round(2 * since), round(2 * now) + 1)
        for command in fleet.handle(Tick(), tick / 2)
    ]


def test_a_silent_worker_counts_as_stuck_until_its_next_message() -> None:
    fleet = started(stuck_after=10.0)
    ticks(fleet, 0.0, 9.0)
    assert fleet.health()[0]
    assert ticks(fleet, 9.5, 11.0) == []
    assert fleet.health() == (False, f"worker {W} is stuck: it has not responded for 10 seconds")
    send_events(fleet)
    assert fleet.health()[0]


def test_a_worker_that_stays_silent_is_killed() -> None:
    fleet = started(stuck_after=10.0)
    assert ticks(fleet, 0.0, 30.0) == []
    assert ticks(fleet, 30.5, 30.5) == [Kill(W, "it has not responded for 30 s")]
    assert fleet.handle(WorkerLost(W, 1, "killed"), 31.0) == [Start(W, 2)]


def test_a_silent_worker_with_a_request_is_killed_at_once() -> None:
    fleet = started(stuck_after=10.0)
    ticks(fleet, 0.0, 8.0)
    fleet.handle(OPEN, 8.0)
    assert ticks(fleet, 8.5, 10.0) == []
    assert ticks(fleet, 10.5, 10.5) == [Kill(W, "it has not responded for 10 s")]
    assert fleet.handle(WorkerLost(W, 1, "killed", frozenset(), ending="unclear"), 11.0) == [Start(W, 2)]
    assert submitted(fleet.handle(WorkerMessage(W, 2, READY), 12.0)).request == "r"


def test_a_worker_whose_steps_compute_nothing_is_named_and_replaced() -> None:
    fleet = started()
    fleet.handle(OPEN, 0.0)

    def report(standstill: float, now: float) -> None:
        message = msgspec.structs.replace(REPORT, standstill_seconds=standstill)
        fleet.handle(WorkerMessage(W, 1, message), now)

    report(9.5, 9.5)
    assert fleet.handle(Tick(), 9.6) == []
    report(10.5, 10.5)
    reason = "its steps computed nothing for 10 s, although requests wait"
    assert fleet.handle(Tick(), 10.6) == [Kill(W, reason)]
    assert fleet.health() == (False, f"worker {W} is stuck: {reason}")
    assert fleet.handle(WorkerLost(W, 1, "killed"), 10.7) == [Start(W, 2)]
    assert fleet.health() == (False, f"worker {W} is being restarted: {reason}")
    assert set(fleet.requests) == {"r"}, "the request continues with the next process"


def test_no_answer_goes_on_with_another_model() -> None:
    """No answer continues with another model: the model's files are replaced, and then the only worker
    dies."""
    fleet = started()
    fleet.handle(OPEN, 0.0)
    fleet.handle(msgspec.structs.replace(OPEN, request="unanswered"), 0.0)
    send_events(fleet, Token("r", 0, 0, 0, 7))
    fleet.handle(WorkerLost(W, 1, "killed"), 1.0)
    model = msgspec.structs.replace(READY.model, fingerprint="another")
    other = msgspec.structs.replace(READY, model=model)
    assert READY.model.kv_name != other.model.kv_name
    refuse, *sent = fleet.handle(WorkerMessage(W, 2, other), 2.0)
    assert isinstance(refuse, Refuse)
    assert (refuse.request, refuse.error.status) == ("r", 503)
    assert "were replaced" in str(refuse.error)
    assert submitted(sent).request == "unanswered"


def test_an_answer_goes_on_with_the_same_model() -> None:
    fleet = started()
    fleet.handle(OPEN, 0.0)
    send_events(fleet, Token("r", 0, 0, 0, 7))
    fleet.handle(WorkerLost(W, 1, "killed"), 1.0)
    assert submitted(fleet.handle(WorkerMessage(W, 2, READY), 2.0)).outputs == {0: [7]}


def opened(name: str, prompt: int) -> Open:
    return Open(name, [1] * prompt, SamplingParams(seed=1, max_tokens=9))


def refusal(commands) -> RequestError:
    (refused,) = commands
    assert isinstance(refused, Refuse)
    assert refused.error.status == 429
    return refused.error


def test_at_the_request_limit_retry_after_is_the_time_to_serve_the_queue() -> None:
    """At the request limit, Retry-After is the time to serve the queue: ten requests ended in five seconds,
    so the four waiting requests and the new one need two and a half seconds."""
    fleet = started(max_requests=4)
    for number in range(10):
        name, now = f"r{number}", 0.5 * (number + 1)
        attempt = submitted(fleet.handle(opened(name, 3), now)).attempt
        last = Token(name, attempt, 0, 0, 7, finish="stop")
        fleet.handle(WorkerMessage(W, 1, Events([last])), now)
    for number in range(4):
        submitted(fleet.handle(opened(f"w{number}", 3), 5.5))
    error = refusal(fleet.handle(opened("late", 3), 5.5))
    assert "4 requests are open, which is the limit (max_requests)" in error.message
    assert error.retry_after == pytest.approx(2.5)


def test_prompts_beyond_the_limit_of_waiting_tokens_are_refused() -> None:
    fleet = started(max_waiting_tokens=100)
    first = submitted(fleet.handle(opened("first", 200), 0.0)).attempt  # one request may always wait
    error = refusal(fleet.handle(opened("second", 1), 0.0))
    assert "200 tokens are waiting already; the limit is 100 (max_waiting_tokens)" in error.message
    assert error.retry_after == 1.0  # the rate is not known yet
    fleet.handle(WorkerMessage(W, 1, Events([Admitted("first", first, 0, 0)])), 4.0)
    for name, prompt in (("second", 60), ("third", 40)):
        submitted(fleet.handle(opened(name, prompt), 10.0))
    error = refusal(fleet.handle(opened("fourth", 1), 10.0))
    assert error.retry_after == pytest.approx(100 * 6 / 200)


def test_retry_after_is_bounded() -> None:
    fleet = started(max_waiting_tokens=10)
    attempt = submitted(fleet.handle(opened("small", 1), 0.0)).attempt
    fleet.handle(WorkerMessage(W, 1, Events([Admitted("small", attempt, 0, 0)])), 0.0)
    submitted(fleet.handle(opened("big", 100_000), 20.0))
    assert refusal(fleet.handle(opened("late", 1), 20.0)).retry_after == 60.0


STREAM = Open("r", [1, 2, 3], SamplingParams(seed=1, max_tokens=9), open=True, tail=1)


def edits(commands) -> list[messages.Edit]:
    return [c.message for c in commands if isinstance(c, Send) and isinstance(c.message, messages.Edit)]


def test_edits_of_a_prompt_stream_go_to_its_worker() -> None:
    fleet = started()
    submit = submitted(fleet.handle(STREAM, 0.0))
    assert (submit.open, submit.tail, submit.version) == (True, 1, 0)
    (edit,) = edits(fleet.handle(ClientEdit("r", 1, retained=2, tokens=[7, 3], tail=1), 2.0))
    assert edit == messages.Edit("r", submit.attempt, 1, 2, [7, 3], False, None, 1, arrival=2.0)
    (last,) = edits(fleet.handle(ClientEdit("r", 2, retained=4, tokens=[], finish=True), 3.0))
    assert last.finish


@pytest.mark.parametrize(
    ("edit", "status"),
    [
        (ClientEdit("other", 1, 0, []), 404),
        (ClientEdit("r", 0, 0, []), 409),
        (ClientEdit("r", 1, 4, []), 400),
        (ClientEdit("r", 1, -1, []), 400),
        (ClientEdit("r", 1, 1, [5], tail=3), 400),
        (ClientEdit("r", 1, 1, [5], params=SamplingParams(n=2)), 400),
    ],
)
def test_an_edit_that_does_not_fit_changes_nothing(edit: ClientEdit, status: int) -> None:
    fleet = started()
    fleet.handle(STREAM, 0.0)
    refusal = fleet.edit_refusal(edit)
    assert refusal is not None
    assert refusal.status == status
    assert fleet.handle(edit, 1.0) == []
    assert fleet.requests["r"].opened == STREAM


def test_a_finished_prompt_takes_no_more_edits() -> None:
    fleet = started()
    fleet.handle(STREAM, 0.0)
    fleet.handle(ClientEdit("r", 1, 3, [], finish=True), 1.0)
    refusal = fleet.edit_refusal(ClientEdit("r", 2, 3, [4]))
    assert refusal is not None
    assert refusal.status == 409


def test_the_next_attempt_has_the_latest_prompt() -> None:
    fleet = started()
    fleet.handle(STREAM, 0.0)
    fleet.handle(ClientEdit("r", 1, 2, [7, 8, 3], tail=1), 1.0)
    fleet.handle(WorkerLost(W, 1, "killed"), 2.0)
    fleet.handle(ClientEdit("r", 2, 3, [9], finish=True), 2.5)
    again = submitted(fleet.handle(WorkerMessage(W, 2, READY), 3.0))
    assert (again.prompt, again.open, again.version) == ([1, 2, 7, 9], False, 2)


def test_an_early_answer_is_withdrawn_once_and_tokens_of_the_old_prompt_are_dropped() -> None:
    fleet = started()
    early = Open("r", [1, 2], SamplingParams(seed=1, max_tokens=9), open=True, answer_early=True)
    attempt = submitted(fleet.handle(early, 0.0)).attempt
    send_events(fleet, token(attempt, 0))
    _, delivered = fleet.handle(ClientEdit("r", 1, 2, [3]), 1.0)
    assert delivered == Deliver("r", [OutputWithdrawn("r", attempt, 1)], last=False)
    assert send_events(fleet, token(attempt, 1)) == [], "sampled before the worker took the edit"
    fresh = token(attempt, 0)
    assert send_events(fleet, OutputWithdrawn("r", attempt, 1), fresh) == [Deliver("r", [fresh], last=False)]
    fleet.handle(ClientEdit("r", 2, 3, [], finish=True), 2.0)
    (delivered,) = send_events(fleet, token(attempt, 1, finish="stop"))
    assert delivered.last, "a finish that changes nothing lets the answer stand"


@pytest.mark.parametrize("lost_first", [False, True])
def test_after_a_loss_nothing_of_an_older_prompt_is_resumed(lost_first: bool) -> None:
    fleet = started()
    early = Open("r", [1, 2], SamplingParams(seed=1, max_tokens=9), open=True, answer_early=True)
    attempt = submitted(fleet.handle(early, 0.0)).attempt
    send_events(fleet, token(attempt, 0))
    changes = [ClientEdit("r", 1, 1, [3]), WorkerLost(W, 1, "killed")]
    for change in reversed(changes) if lost_first else changes:
        fleet.handle(change, 2.0)
    again = submitted(fleet.handle(WorkerMessage(W, 2, READY), 3.0))
    assert (again.prompt, again.outputs) == ([1, 3], {0: []})
    first = token(again.attempt, 0)
    assert send_events(fleet, first, incarnation=2) == [Deliver("r", [first], last=False)]


def test_progress_of_older_versions_is_dropped() -> None:
    fleet = started()
    attempt = submitted(fleet.handle(STREAM, 0.0)).attempt
    fleet.handle(ClientEdit("r", 1, 2, [7, 3]), 1.0)
    assert send_events(fleet, Progress("r", attempt, 0, 2, 3)) == []
    updates = Progress("r", attempt, 1, 2, 4)
    assert send_events(fleet, updates) == [Deliver("r", [updates], last=False)]
