"""A supervised process has legal transitions, a back-off, and limits of silence."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.fleet.events import Heartbeat
from streamserve.fleet.process_state import (
    GIVE_UP_STARTS,
    MAX_GAP,
    PROGRESS_FACTOR,
    ProcessState,
    SupervisionPolicy,
    Watch,
)
from streamserve.protocol.messages import Failed

POLICY = SupervisionPolicy(stuck_after=10.0)
WITHOUT_BEATS = SupervisionPolicy(
    stuck_after=30.0, idle_factor=1.0, load_silence=math.inf, immediate_restarts=0, max_back_off=30.0
)


def ready_at(now: float) -> ProcessState[str]:
    process: ProcessState[str] = ProcessState()
    process.starts(0.0)
    process.join("ready", now)
    return process


@pytest.mark.parametrize(
    ("policy", "waits"),
    [
        (POLICY, [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]),
        (WITHOUT_BEATS, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
    ],
)
def test_the_back_off_doubles_up_to_a_limit_and_never_ends(
    policy: SupervisionPolicy, waits: list[float]
) -> None:
    process = ready_at(0.0)
    assert [process.lose("killed", 1.0, policy, final=False) for _ in waits] == waits
    assert all(process.lose("killed", 1.0, policy, final=False) == waits[-1] for _ in range(1000))


def test_a_process_that_was_stable_starts_its_back_off_again() -> None:
    process = ready_at(0.0)
    for _ in range(5):
        process.lose("killed", 1.0, WITHOUT_BEATS, final=False)
    process.join("ready", 100.0)
    assert process.lose("killed", 100.0 + WITHOUT_BEATS.stable_seconds, WITHOUT_BEATS, final=False) == 0.5


def test_a_first_start_that_fails_may_be_final_and_a_later_one_never() -> None:
    process: ProcessState[str] = ProcessState()
    assert process.lose("no such model", 1.0, POLICY, final=True) is None
    assert process.failure
    process = ready_at(0.0)
    assert process.lose("killed", 1.0, POLICY, final=True) == 0.0
    assert process.lose("killed", 2.0, POLICY, final=True) == 0.5
    assert not process.failure


def test_each_transition_leaves_a_state_that_agrees_with_itself() -> None:
    process = ready_at(4.0)
    assert (process.healthy, process.load_seconds, process.until_ready(5.0)) == (True, 4.0, 0.0)
    process.tick(None, 15.0, POLICY)
    assert (process.healthy, process.stuck) == (False, True)
    process.hear(16.0)
    assert process.healthy
    process.lose("killed", 17.0, POLICY, final=False)
    assert (process.ready, process.stuck, process.incarnation, process.error) == (None, False, 2, "killed")
    assert process.until_ready(18.0) == 3.0, "loading took four seconds"
    process.join("ready", 20.0)
    assert (process.healthy, process.failed_starts, process.error) == (True, 0, "")


def test_the_last_words_of_a_process_tell_its_end_better_than_its_status() -> None:
    process = ready_at(0.0)
    process.fail(Failed("out of memory", 1), final=False)
    process.lose("exit status 1", 1.0, POLICY, final=False)
    assert (process.error, process.last_words) == ("out of memory", "")


def test_requests_wait_for_a_process_until_its_starts_keep_failing() -> None:
    process = ready_at(0.0)
    process.lose("killed", 1.0, POLICY, final=False)
    for _ in range(GIVE_UP_STARTS):
        assert not process.down
        process.lose("killed", 2.0, POLICY, final=False)
    assert process.down
    process.join("ready", 3.0)
    assert not process.down


def test_silence_is_killed_by_the_policy_of_the_process() -> None:
    """The policy of a process decides when silence is fatal: at once if a request waits, later if none
    does."""
    assert not ready_at(0.0).tick(None, 10.0, POLICY, busy=True)
    assert ready_at(0.0).tick(None, 11.0, POLICY, busy=True)
    assert not ready_at(0.0).tick(None, 30.0, POLICY)
    assert ready_at(0.0).tick(None, 31.0, POLICY)
    assert not ready_at(0.0).tick(None, 30.0, WITHOUT_BEATS)
    assert ready_at(0.0).tick(None, 31.0, WITHOUT_BEATS)


def test_an_idle_process_that_is_silent_is_stuck_before_it_is_killed() -> None:
    process = ready_at(0.0)
    assert not process.tick(Heartbeat(at=1.0), 12.0, POLICY)
    assert process.stuck
    assert process.tick(Heartbeat(at=1.0), 12.5, POLICY, busy=True), "now a request waits for it"
    assert process.last_words == "it has not responded for 12 s"


def test_a_step_may_stand_still_for_five_times_its_predicted_part() -> None:
    def tick(now: float, predicted: float) -> bool:
        return ready_at(0.0).tick(Heartbeat(now, "run", 1.0, predicted), now, POLICY)

    assert not tick(11.0, 0.1)
    assert tick(11.1, 0.1)
    assert not tick(21.0, 20.0 / PROGRESS_FACTOR)
    assert tick(21.1, 20.0 / PROGRESS_FACTOR)


def test_a_process_is_named_with_its_phase_and_whether_it_lives() -> None:
    hung, stopped = ready_at(0.0), ready_at(0.0)
    assert hung.tick(Heartbeat(20.0, "verify", 5.0, 0.1), 20.0, POLICY)
    assert stopped.tick(Heartbeat(5.0, "verify", 5.0, 0.1), 20.0, POLICY)
    assert (hung.last_words, hung.condemned) == (
        "its step made no progress for 15 s in phase verify",
        "fault",
    )
    assert (stopped.last_words, stopped.condemned) == ("it has not responded for 15 s", "unclear")
    hung.lose("its process ended with SIGKILL", 21.0, POLICY, final=False)
    assert (hung.error, hung.condemned) == ("its step made no progress for 15 s in phase verify", None)


def test_a_process_that_ends_slowly_is_not_killed_at_each_tick() -> None:
    process = ready_at(0.0)
    kills = [now for now in range(11, 40) if process.tick(Heartbeat(0.0, "run"), float(now), POLICY)]
    assert kills == [11, 22, 33]
    assert process.stuck, "no request is sent to this process"


def test_a_process_without_beats_may_load_for_as_long_as_it_takes() -> None:
    loading: ProcessState[str] = ProcessState()
    loading.starts(0.0)
    assert not loading.tick(None, 1e6, WITHOUT_BEATS)
    assert not loading.tick(Heartbeat(at=999.0), 1000.0, POLICY)
    assert not loading.tick(Heartbeat(at=999.0), 999.0 + POLICY.load_silence, POLICY)
    assert loading.tick(None, 1000.0, POLICY)


def test_a_misfit_waits_longer_each_time_and_fits_again_later() -> None:
    process = ready_at(0.0)
    process.misfit = True
    waits = [process.lose("another model", 1.0, POLICY, final=False) for _ in range(14)]
    assert waits[:8] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert waits[-1] == POLICY.max_misfit_back_off
    process.join("ready", 1000.0)
    assert process.lose("killed", 1001.0, POLICY, final=False) == POLICY.max_back_off


@given(
    seed=st.integers(0, 2**32), stuck_after=st.floats(3.0, 60.0), predicted=st.floats(0.0, 30.0),
    in_step=st.booleans(), stops=st.integers(0, 3),
)  # fmt: skip
def test_who_makes_progress_is_never_killed_and_who_does_not_always_is(
    seed: int, stuck_after: float, predicted: float, in_step: bool, stops: int
) -> None:
    """A process that makes progress is never killed, and one that makes none always is, although the
    supervisor's ticks come late and the supervisor itself is stopped at times for any duration. The other
    process meanwhile continues, or is stopped too."""
    rng, policy, watch, process = random.Random(seed), SupervisionPolicy(stuck_after), Watch(), ready_at(0.0)
    limit = max(stuck_after, PROGRESS_FACTOR * predicted) if in_step else stuck_after
    stand_still, now, moved_at, returned_at = rng.uniform(50, 300), 0.0, 0.0, 0.0
    naps = sorted(rng.uniform(0, 300) for _ in range(stops))
    while now < 10_000:
        now += rng.uniform(0.1, MAX_GAP)
        if naps and now > naps[0]:
            naps.pop(0)
            now = returned_at = now + rng.uniform(MAX_GAP, 1000)
        if now < stand_still and now - moved_at > rng.uniform(0, limit - MAX_GAP):
            moved_at = now
        beat = Heartbeat(now, "run" if in_step else "", moved_at, predicted if in_step else 0.0)
        if process.tick(beat, now, policy, watch.look(now), busy=True):
            break
    assert now >= stand_still, "it made progress"
    assert limit < now - max(moved_at, returned_at) <= limit + MAX_GAP, "killed as soon as it is certain"
