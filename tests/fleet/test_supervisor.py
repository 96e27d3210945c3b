"""Workers that die, drain, or have another KV format are restarted at the right time, or not at all."""

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from streamserve.fleet.events import Command, Heartbeat, Kill, Start
from streamserve.fleet.process_state import GIVE_UP_STARTS
from streamserve.fleet.prompt_queue import Queued
from streamserve.fleet.report_totals import counted, total
from streamserve.fleet.supervisor import WorkerSupervisor
from streamserve.fleet.worker_state import RECENT, Topology, WorkerState, pairs, unified
from streamserve.protocol.cost_curve import CostCurve
from streamserve.protocol.messages import Failed
from streamserve.protocol.reports import RemoteReport, StepParts
from tests.api.reports import REPORT
from tests.fleet.fakes import READY


def started(topology: Topology, **options) -> WorkerSupervisor:
    supervisor = WorkerSupervisor(topology, **({"stuck_after": 30.0} | options), commands=[])
    supervisor.start(0.0)
    for worker in topology.names:
        assert supervisor.join(worker, READY, 5.0)
    return supervisor


def taken(supervisor: WorkerSupervisor) -> list[Command]:
    """Return the supervisor's commands, and clear them."""
    commands = supervisor.commands.copy()
    supervisor.commands.clear()
    return commands


def restart(supervisor: WorkerSupervisor, name: str, reason: str, now: float, blamed: bool = False) -> Start:
    """Return the start that follows the loss of a worker."""
    supervisor.commands.clear()
    supervisor.lose(name, reason, now, blamed)
    (start,) = supervisor.commands
    assert isinstance(start, Start)
    return start


def backoffs(
    supervisor: WorkerSupervisor, count: int, blamed: bool = False, ready: bool = False
) -> list[float]:
    """Return the seconds before each of `count` restarts of a worker, which becomes ready if `ready`."""
    seconds = []
    for _ in range(count):
        worker = supervisor.workers["unified-0"]
        start = restart(supervisor, "unified-0", "killed", 10.0, blamed)
        assert start == Start("unified-0", worker.incarnation, start.after)
        seconds.append(start.after)
        if ready:
            assert supervisor.join("unified-0", READY, 10.0)
    return seconds


def test_each_further_loss_is_followed_by_a_longer_wait_up_to_a_limit() -> None:
    assert backoffs(started(unified(1)), 9) == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


def test_every_worker_is_restarted() -> None:
    supervisor = started(unified(1))
    backoffs(supervisor, 100)
    assert not supervisor.availability.serving(), "requests do not wait for it"
    assert "killed" in supervisor.availability.health()[1]
    assert supervisor.join("unified-0", READY, 2000.0)
    assert supervisor.availability.health() == (True, "ready")
    assert supervisor.availability.serving() == {"unified-0"}


def test_deaths_that_a_request_is_blamed_for_delay_nothing() -> None:
    supervisor = started(unified(1))
    assert backoffs(supervisor, 20, blamed=True, ready=True) == [0.0] * 20
    assert backoffs(supervisor, 2) == [0.0, 0.5]


def test_a_worker_that_was_stable_or_finished_a_request_is_restarted_at_once() -> None:
    supervisor = started(unified(1))
    backoffs(supervisor, 4, ready=True)
    supervisor.workers["unified-0"].recent_losses = 0
    assert backoffs(supervisor, 2, ready=True) == [0.0, 0.5]
    start = restart(supervisor, "unified-0", "killed", 70.0)
    assert start.after == 0.0


def test_before_the_first_request_could_be_served_a_death_is_final() -> None:
    supervisor = WorkerSupervisor(unified(1), 30.0, [])
    supervisor.start(0.0)
    assert taken(supervisor) == [Start("unified-0", 1)]
    supervisor.lose("unified-0", "no such model", 1.0)
    assert taken(supervisor) == []
    assert supervisor.workers["unified-0"].failure


def test_recovery_is_the_backoff_and_the_load_time() -> None:
    supervisor = started(pairs(2))
    assert supervisor.availability.recovery(6.0) == 0.0
    for half in ("decode-0", "decode-1"):
        supervisor.lose(half, "killed", 6.0)
    assert supervisor.availability.recovery(6.0) == 5.0, "loading took five seconds"
    assert supervisor.availability.recovery(8.0) == 3.0
    assert supervisor.availability.recovery(60.0) == 1.0, "the worker may be ready at any moment"
    for half in ("decode-0", "decode-1"):
        supervisor.lose(half, "killed", 8.0)
    assert supervisor.availability.recovery(8.0) == 5.5


def test_a_loss_is_processed_once() -> None:
    supervisor = started(unified(1))
    assert supervisor.is_current("unified-0", 1)
    assert restart(supervisor, "unified-0", "killed", 1.0)
    assert not supervisor.is_current("unified-0", 1)


IN_A_STEP = Heartbeat(at=0.0, phase="run", moved_at=0.0, predicted=50.0)


def ticked(supervisor: WorkerSupervisor, since: float, now: float, **changes: float) -> list[Command]:
    """Tick twice a second; return the workers that are killed by `now`. By default, a sign of life and
    progress are seen at each tick."""
    supervisor.commands.clear()
    at = since
    while at <= now:
        beat = dataclasses.replace(IN_A_STEP, **({"at": at, "moved_at": at} | changes))
        key = "unified-0", supervisor.workers["unified-0"].incarnation
        supervisor.tick(at, {key: beat})
        at += 0.5
    return taken(supervisor)


def test_a_step_whose_parts_are_predicted_to_be_long_may_be_long() -> None:
    supervisor = started(unified(1), stuck_after=10.0)
    assert ticked(supervisor, 5.0, 250.0, moved_at=0.0) == []
    assert supervisor.availability.health()[0]
    assert len(ticked(supervisor, 250.5, 256.0, moved_at=0.0)) == 1


def test_a_step_that_makes_progress_may_be_longer_than_predicted() -> None:
    supervisor = started(unified(1), stuck_after=10.0)
    assert ticked(supervisor, 5.0, 450.0, predicted=0.0) == []
    assert supervisor.availability.health()[0]


def test_a_step_that_hangs_is_named_and_killed_despite_heartbeats() -> None:
    supervisor = started(unified(1), stuck_after=10.0)
    assert ticked(supervisor, 5.0, 15.0, moved_at=5.0, predicted=0.1) == []
    reason = "its step made no progress for 10 s in phase run"
    assert ticked(supervisor, 15.5, 15.5, moved_at=5.0, predicted=0.1) == [Kill("unified-0", reason)]
    assert supervisor.availability.health() == (False, f"worker unified-0 is stuck: {reason}")
    supervisor.lose("unified-0", "its process ended with SIGKILL", 17.0)
    assert supervisor.availability.health() == (False, f"worker unified-0 is being restarted: {reason}")


def test_a_stopped_worker_is_killed_however_long_its_predicted_step() -> None:
    supervisor = started(unified(1), stuck_after=10.0)
    stopped = {"at": 5.0, "moved_at": 5.0, "predicted": 1e6}
    assert ticked(supervisor, 5.0, 16.0, **stopped) == [Kill("unified-0", "it has not responded for 10 s")]


def test_heartbeats_between_steps_do_not_replace_reports() -> None:
    supervisor = started(unified(1), stuck_after=10.0)
    assert ticked(supervisor, 5.0, 35.0, phase="", moved_at=0.0, predicted=0.0) == []
    assert len(ticked(supervisor, 35.5, 40.0, phase="", moved_at=0.0, predicted=0.0)) == 1


def test_heartbeats_of_an_earlier_process_do_not_count() -> None:
    supervisor = started(unified(1), stuck_after=10.0)
    supervisor.workers["unified-0"].queue("r", Queued(5), 5.0)
    beats = {("unified-0", 0): IN_A_STEP}
    supervisor.commands.clear()
    for tick in range(10, 40):
        supervisor.tick(0.5 * tick, beats)
    assert len(taken(supervisor)) == 1


def test_an_idle_worker_is_killed_as_soon_as_a_request_waits() -> None:
    supervisor = started(unified(1), stuck_after=10.0)
    supervisor.commands.clear()
    beats = {("unified-0", 1): Heartbeat(at=5.0)}
    for tick in range(10, 50):
        supervisor.tick(0.5 * tick, beats)
        assert not supervisor.commands
    assert supervisor.availability.health()[1].startswith("worker unified-0 is stuck")
    supervisor.tick(25.0, beats, waiting=True)
    assert taken(supervisor)


def test_workers_are_not_killed_when_this_process_was_stopped() -> None:
    """Workers are not killed after this process was stopped: they were stopped too, or have sent reports that
    were not read yet."""
    supervisor = started(unified(1), stuck_after=10.0)
    supervisor.workers["unified-0"].queue("r", Queued(5), 5.0)
    assert ticked(supervisor, 5.0, 14.0, at=5.0, moved_at=5.0) == []
    assert ticked(supervisor, 5000.0, 5009.5, at=5.0, moved_at=5.0) == []
    assert supervisor.availability.health()[0]
    assert len(ticked(supervisor, 5010.0, 5011.0, at=5.0, moved_at=5.0)) == 1, "it stays silent"


def test_a_worker_that_hangs_while_it_loads_is_killed() -> None:
    supervisor = WorkerSupervisor(unified(1), 30.0, [])
    supervisor.start(0.0)
    assert ticked(supervisor, 0.0, 300.0, phase="", at=299.0) == []
    assert ticked(supervisor, 300.5, 419.0, phase="", at=299.0) == []
    assert len(ticked(supervisor, 419.5, 425.0, phase="", at=299.0)) == 1


def test_a_draining_worker_drains_its_pair() -> None:
    supervisor = started(pairs(2))
    supervisor.workers["decode-0"].draining = True
    assert supervisor.availability.open() == {"prefill-0", "prefill-1", "decode-1"}
    assert supervisor.availability.health() == (True, "ready")
    assert supervisor.availability.unavailable_reason() == ""


def test_a_draining_worker_serves_open_requests_if_it_is_the_last() -> None:
    supervisor = started(pairs(2))
    supervisor.workers["prefill-0"].draining = True
    for _ in range(GIVE_UP_STARTS + 1):
        supervisor.lose("decode-1", "killed", 1.0)
    assert "prefill-0" in supervisor.availability.open()
    assert supervisor.availability.unavailable_reason() == "draining: prefill-0", "no new requests"
    assert not supervisor.availability.health()[0]


NAME = READY.model.kv_name


@pytest.mark.parametrize(
    ("other", "both"),
    [
        ({"block_size": 8}, (f"{NAME}/8/1", f"{NAME}/4/1")),
        ({"model": replace(READY.model, fingerprint="another")}, (f"another{NAME[4:]}/4/1", f"{NAME}/4/1")),
        ({"draft": "drafty"}, (f"{NAME}/drafty/4/1", f"{NAME}/4/1")),
    ],
    ids=["block size", "weights", "draft model"],
)
def test_a_worker_with_another_kv_format_is_refused(other: dict[str, Any], both: tuple[str, str]) -> None:
    supervisor = started(pairs(1))
    supervisor.lose("decode-0", "killed", 1.0)
    assert not supervisor.join("decode-0", replace(READY, **other), 2.0)
    worker = supervisor.workers["decode-0"]
    assert worker.ready is None
    assert not worker.failure, "the model may have been corrected"
    assert worker.error.startswith(f"its KV format is {both[0]}, but worker prefill-0 has {both[1]}: ")
    assert "restore the old ones" in worker.error


@pytest.mark.parametrize(
    "differs", [{"numerics_class": "native amx"}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}]
)
@pytest.mark.parametrize("topology", [pairs(1), unified(2)], ids=["pair", "unified"])
def test_a_worker_of_other_numerics_is_refused_by_name(topology: Topology, differs: dict[str, str]) -> None:
    supervisor = started(topology)
    first, second = supervisor.workers
    supervisor.lose(second, "killed", 1.0)
    other = replace(READY, model=replace(READY.model, **differs))
    assert not supervisor.join(second, other, 2.0)
    error = supervisor.workers[second].error
    assert error.startswith(f"its numerics are {other.model.numerics!r}, but worker {first} has")
    assert "--numerics native or portable" in error


def test_a_worker_that_does_not_fit_is_named_and_started_less_and_less_often() -> None:
    supervisor = started(unified(2))
    assert supervisor.expected("unified-1") == READY.model.fingerprint
    now, waits = 10.0, []
    supervisor.lose("unified-1", "its process ended with SIGKILL", now)
    for _ in range(12):
        supervisor.fail("unified-1", Failed("it is another model", 2, misfit=True))
        start = restart(supervisor, "unified-1", "its process ended with exit status 2", now)
        waits.append(start.after)
        now += start.after
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0]
    assert supervisor.availability.health() == (True, "ready")
    assert supervisor.availability.missing() == (
        "worker unified-1 does not match the other workers and is not used (12 starts failed): "
        "it is another model"
    )
    assert supervisor.join("unified-1", READY, now)
    assert supervisor.availability.missing() == ""
    start = restart(supervisor, "unified-1", "its process ended with SIGKILL", now + 100)
    assert start.after == 0.0


def test_any_model_is_expected_where_no_other_worker_is_ready() -> None:
    supervisor = started(unified(2))
    supervisor.lose("unified-0", "killed", 10.0)
    assert supervisor.expected("unified-0") == READY.model.fingerprint
    assert supervisor.expected("unified-1") == ""


def test_worker_costs_follow_its_reported_curve() -> None:
    curve = CostCurve(
        tokens=(1, 100), kv_bytes=(0, 1000), seconds=((1.0, 2.0), (3.0, 4.0)),
        pair_seconds=0.5, token_seconds=0.0, byte_seconds=0.0,
    )  # fmt: skip
    supervisor = started(unified(1))
    assert supervisor.join("unified-0", replace(READY, cost=curve, kv_token_bytes=10), 6.0)
    costs = supervisor.workers["unified-0"].load("unified-0", 0.0).costs
    assert costs
    assert costs.prefill(100) == 3.0 + 0.5 * (100 * 99 / 2), "long prompts cost more than their rows"
    assert costs.decode(1, 50) == 1.5
    assert costs.block_size == READY.block_size


def test_the_speculation_speedup_follows_the_reports() -> None:
    def reported(generated: int, accepted: int, target: float, draft: float):
        return replace(
            REPORT,
            generation_tokens=generated,
            step_parts=StepParts(scheduling=0.0, draft=draft, target=target),
            speculation=replace(REPORT.speculation, accepted=accepted),
        )

    worker = WorkerState()
    worker.reported(reported(100, 50, 1.0, 0.5))
    assert worker.speedup == 1.0, "a single report has no difference"
    # 60 tokens in 20 sequence steps, which drafted for a third of the time
    worker.reported(reported(160, 90, 2.0, 1.0))
    assert worker.speedup == pytest.approx(1.0 + RECENT * (3.0 * 2 / 3 - 1.0))
    worker.reported(reported(160, 90, 2.0, 1.0))
    assert worker.speedup == pytest.approx(1.0 + RECENT * (3.0 * 2 / 3 - 1.0)), "nothing happened"


def test_counters_of_workers_that_ended_are_kept() -> None:
    """Counters of workers that ended are kept: a sum over workers that falls would look like a restart in the
    metrics."""
    supervisor = started(unified(3))
    for worker in supervisor.workers.values():
        worker.reported(REPORT)
    supervisor.lose("unified-0", "killed", 10.0)
    supervisor.remove(["unified-1"])
    assert supervisor.ended is not None
    assert supervisor.ended.generation_tokens == 2 * REPORT.generation_tokens
    assert supervisor.ended.speculation.accepted_at == [2 * count for count in REPORT.speculation.accepted_at]
    assert (supervisor.ended.running, supervisor.ended.blocks_live, supervisor.ended.blocks_total) == (
        0,
        0,
        0,
    )
    supervisor.lose("unified-0", "killed again, without a report", 11.0)
    assert supervisor.ended.steps == 2 * REPORT.steps


def test_the_sum_of_reports_has_every_workers_faults() -> None:
    faulty = [
        RemoteReport(
            services=1, trees=2, late=0, accepted=3, fallback_trees=0, fallback_accepted=0, moves=0,
            rejected=rejected,
        )
        for rejected in ({}, {"late": 1, "shape": 2}, {"shape": 3})
    ]  # fmt: skip
    summed = total(replace(REPORT, remote=remote) for remote in faulty)
    assert summed is not None
    assert summed.remote.rejected == {"late": 1, "shape": 5}
    assert summed.remote.trees == 6
    assert counted(summed).remote.services == 0
