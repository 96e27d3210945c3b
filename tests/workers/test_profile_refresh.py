"""A profile in doubt is measured anew while the worker is idle, and no request waits for it."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from streamserve.engine.engine import Engine
from streamserve.execution.load import Loaded, load
from streamserve.execution.profile.lock import alone
from streamserve.execution.profile.measure import Effort, measure
from streamserve.execution.profile.profile import Kept, Profile
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.messages import Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.controller import Speculation
from streamserve.speculation.policies import parse_policy
from streamserve.workers.profile_refresh import FIRST_SECONDS, IDLE_SECONDS, Upkeep, command_of
from tests.checkpoints import make_checkpoint

EFFORT = Effort((1, 2, 4), (0, 20), span=4, matrix_rows=(2,), rounds=2, seconds=0.0)
WAIT = 500
COMMAND = "streamserve profile some-model"


class Rig:
    """A worker's engine and upkeep with a clock that the test moves."""

    def __init__(self, folder: Path, stable: bool, factor: float = 1.0) -> None:
        config = ModelConfig(
            path=str(make_checkpoint(folder / "model")), threads=1, num_blocks=8, draft="none"
        )
        self.loaded: Loaded = load(config)
        self.kept = Kept(folder / "profiles")
        (measured,) = measure([("tiny", self.loaded)], EFFORT)
        seconds = tuple(tuple(factor * one for one in line) for line in measured.cost.seconds)
        self.profile: Profile = msgspec.structs.replace(
            measured, stable=stable, cost=replace(measured.cost, seconds=seconds)
        )
        self.kept.write(self.profile)
        self.now = 0.0
        cost = self.profile.cost.in_tokens(self.profile.kv_token_bytes)
        self.engine = Engine(
            self.loaded.engine_config, self.loaded.model_info, self.loaded.executor, time.monotonic, None,
            Speculation(parse_policy("off"), cost),
        )  # fmt: skip
        self.upkeep = Upkeep(self.loaded, self.profile, self.kept, COMMAND, lambda: self.now)

    @property
    def measured(self) -> int:
        """Pieces so far of the measurement that goes on."""
        return self.upkeep._measuring._done if self.upkeep._measuring else 0

    def wait(self) -> int:
        return self.upkeep.wait(self.engine, WAIT)

    def idle(self) -> int:
        """Let the worker be idle until nothing is left to measure; returns how often it asked."""
        self.now += IDLE_SECONDS
        asked = 0
        while self.wait() == 0:
            asked += 1
            assert asked < 1000
        return asked

    def serve(self, prompt: list[int]) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=5)
        self.engine.handle(Submit(str(len(prompt)), 0, prompt, params, {0: []}, 0.0))
        found = []
        while self.engine.has_work:
            assert self.wait() == WAIT, "while there is work nothing is measured"
            found += [event.token for event in self.engine.step() if isinstance(event, Token)]
        return found


@pytest.fixture
def rig(tmp_path: Path) -> Callable[..., Rig]:
    return lambda stable, factor=1.0: Rig(tmp_path, stable, factor)


def test_an_unstable_profile_is_measured_anew_when_the_worker_is_idle(
    rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = rig(stable=False, factor=3.0)
    assert COMMAND in caplog.text
    assert one.wait() == WAIT, "it has only just begun to be idle"
    assert one.idle() > 2
    found = one.kept.read(one.profile.subject)
    assert found is not None
    assert found.cost(1) < one.profile.cost(1)
    assert found.cost.kv_bytes == one.profile.cost.kv_bytes
    assert one.upkeep.profile == found
    assert "measured anew" in caplog.text
    assert one.engine.speculation.step_cost(1, 0) == pytest.approx(found.cost(1)), "and used from now on"


def test_a_stable_profile_that_steps_agree_with_is_left_alone(rig: Callable[..., Rig]) -> None:
    one = rig(stable=True)
    assert one.idle() == 0
    for _ in range(400):
        one.engine.speculation.step_cost.observe(1, 0, 1.1 * one.profile.cost(1))
    assert one.idle() == 0
    assert one.kept.read(one.profile.subject) == one.profile


def test_a_profile_that_steps_contradict_for_long_is_measured_anew(
    rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    one = rig(stable=True, factor=3.0)
    for _ in range(400):
        one.engine.speculation.step_cost.observe(1, 0, one.profile.cost(1) / 3)
    assert one.idle() > 2
    assert "factor of" in caplog.text
    assert COMMAND in caplog.text
    assert not one.engine.speculation.step_cost.contradicted or one.upkeep.profile == one.profile


def test_a_request_that_comes_meanwhile_waits_for_one_step_at_most(rig: Callable[..., Rig]) -> None:
    one = rig(stable=False)
    alone_text = one.serve([3, 5, 7])
    one.now += IDLE_SECONDS
    assert one.wait() == 0
    before = one.measured
    for number in range(3):
        assert one.wait() == 0
        assert one.measured == before + number + 1, "each time a single step"
    assert one.serve([3, 5, 7]) == alone_text
    assert one.measured == before + 3, "and nothing more until the worker is idle again"
    assert one.wait() == WAIT
    assert one.idle() > 0
    assert one.measured == 0


def test_while_another_process_measures_nothing_is_measured(rig: Callable[..., Rig]) -> None:
    one = rig(stable=False)
    with alone(one.kept.folder, 0.0) as had:
        assert had
        one.idle()
    assert one.kept.read(one.profile.subject) == one.profile
    one.idle()
    assert one.kept.read(one.profile.subject) == one.profile, "after a pause"
    one.now += FIRST_SECONDS
    one.idle()
    assert one.kept.read(one.profile.subject) != one.profile


def test_what_goes_wrong_is_said_and_the_worker_goes_on(
    rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    one = rig(stable=False)
    for path in one.kept.folder.iterdir():
        path.unlink()
    one.kept.folder.rmdir()
    one.kept.folder.touch()
    one.idle()
    assert one.serve([3, 5]) == one.serve([3, 5])


def test_the_command_names_what_a_profile_depends_on() -> None:
    config = ModelConfig(path="/models/a b", dtype="float32", threads=2)
    assert command_of(config) == "streamserve profile '/models/a b' --dtype float32 --threads 2"
