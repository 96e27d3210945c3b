"""The lifecycle of a supervised process: its legal transitions, its back-off and its limits of silence."""

import math

import pytest

from streamserve.fleet.events import Heartbeat
from streamserve.fleet.process_state import GIVE_UP_STARTS, ProcessState, SupervisionPolicy
from streamserve.protocol.messages import Failed

POLICY = SupervisionPolicy(stuck_after=10.0)
WITHOUT_BEATS = SupervisionPolicy(
    stuck_after=30.0, kill_factor=1.0, load_silence=math.inf, immediate_restarts=0, max_back_off=30.0
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
    assert not ready_at(0.0).tick(None, 40.0, POLICY)
    assert ready_at(0.0).tick(None, 41.0, POLICY)
    assert not ready_at(0.0).tick(None, 30.0, WITHOUT_BEATS)
    assert ready_at(0.0).tick(None, 31.0, WITHOUT_BEATS)


def test_a_process_without_beats_may_load_for_as_long_as_it_takes() -> None:
    loading: ProcessState[str] = ProcessState()
    loading.starts(0.0)
    assert not loading.tick(None, 1e6, WITHOUT_BEATS)
    assert not loading.tick(Heartbeat(at=999.0), 1000.0, POLICY)
    assert loading.tick(None, 1000.0, POLICY)
