"""A doubtful profile is measured again while the worker is idle, and no request waits for it."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.cost import Line, SwapCost
from streamserve.engine.engine import Engine
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.profile.lock import exclusive_measurement
from streamserve.execution.profile.measure import Effort, measure
from streamserve.execution.profile.profile import Profile, ProfileStore
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.messages import Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.controller import Speculation
from streamserve.workers.profile_refresh import FIRST_SECONDS, IDLE_SECONDS, ProfileRefresher, command_of
from tests.checkpoints import make_checkpoint

EFFORT = Effort((1, 2, 4), (0, 20), span=4, matrix_rows=(2,), rounds=2, seconds=0.0)
WAIT = 500
COMMAND = "streamserve profile some-model"


class Rig:
    """A worker's engine and profile refresher with a clock that the test sets."""

    def __init__(self, folder: Path, stable: bool, factor: float = 1.0) -> None:
        config = ModelConfig(
            path=str(make_checkpoint(folder / "model")), threads=1, num_blocks=8, draft="none"
        )
        self.loaded: Loaded = load(config)
        self.store = ProfileStore(folder / "profiles")
        (measured,) = measure([("tiny", self.loaded)], EFFORT)
        seconds = tuple(tuple(factor * value for value in line) for line in measured.cost.seconds)
        self.profile: Profile = msgspec.structs.replace(
            measured, stable=stable, cost=msgspec.structs.replace(measured.cost, seconds=seconds)
        )
        self.store.write(self.profile)
        self.now = 0.0
        cost = self.profile.cost.in_tokens(self.profile.kv_token_bytes)
        self.engine = Engine(
            self.loaded.engine_config, self.loaded.model_info, self.loaded.executor, time.monotonic, None,
            Speculation(parse_policy("off"), cost),
        )  # fmt: skip
        self.refresher = ProfileRefresher(self.loaded, self.profile, self.store, COMMAND, lambda: self.now)

    @property
    def measured(self) -> int:
        """Return the number of pieces of the running measurement so far."""
        return self.refresher._measuring.pieces if self.refresher._measuring else 0

    def wait(self) -> int:
        return self.refresher.wait(self.engine, WAIT)

    def idle(self) -> int:
        """Let the worker be idle until nothing is left to measure; return the number of calls."""
        self.now += IDLE_SECONDS
        calls = 0
        while self.wait() == 0:
            calls += 1
            assert calls < 1000
        return calls

    def serve(self, prompt: list[int]) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=5)
        self.engine.handle(Submit(str(len(prompt)), prompt, params, outputs={0: []}))
        tokens = []
        while self.engine.has_work:
            assert self.wait() == WAIT, "while there is work nothing is measured"
            tokens += [event.token for event in self.engine.step() if isinstance(event, Token)]
        return tokens


@pytest.fixture
def make_rig(tmp_path: Path) -> Callable[..., Rig]:
    return lambda stable, factor=1.0: Rig(tmp_path, stable, factor)


def test_an_unstable_profile_is_measured_again_when_the_worker_is_idle(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    rig = make_rig(stable=False, factor=30.0)  # more than other load changes a measurement
    assert COMMAND in caplog.text
    assert rig.wait() == WAIT, "the worker has been idle for too short a time"
    assert rig.idle() > 2
    measured = rig.store.read(rig.profile.subject)
    assert measured is not None
    assert measured.cost(1) < rig.profile.cost(1)
    assert measured.cost.kv_bytes == rig.profile.cost.kv_bytes
    assert rig.refresher.profile == measured
    assert "measured again" in caplog.text
    own = {record.levelno for record in caplog.records if record.name.endswith("profile_refresh")}
    assert own == {logging.DEBUG}
    assert rig.engine.speculation.step_cost(1, 0) == pytest.approx(measured.cost(1)), (
        "the new profile is used from now on"
    )


def test_a_profile_of_a_busy_machine_leaves_nothing_behind(make_rig: Callable[..., Rig]) -> None:
    """Measuring the profile of a busy machine again leaves no old values: bandwidth, matrix rate and floor
    are measured again, and so are numbers of query tokens that the first measurement had no time for."""
    rig = make_rig(stable=False, factor=30.0)
    busy = msgspec.structs.replace(
        rig.profile,
        bandwidth=1e6,
        matrix_rate=1e6,
        multiplier_rate=0.0,
        swap=SwapCost(Line(1.0, 1.0), Line(1.0, 1.0)),
        floor=tuple(tuple(30 * floor for floor in line) for line in rig.profile.floor),
    )
    rig.refresher.profile = busy
    rig.idle()
    measured = rig.refresher.profile
    assert measured is not None
    assert measured.bandwidth > 1e7
    assert measured.matrix_rate > 1e7
    assert set(measured.cost.tokens) > set(busy.cost.tokens)
    assert [len(line) for line in measured.floor] == [len(line) for line in measured.cost.seconds]
    for floors, seconds in zip(measured.floor, measured.cost.seconds, strict=True):
        assert all(floor <= second * 1.001 for floor, second in zip(floors, seconds, strict=True))
    assert measured.swap
    assert measured.swap.out(1 << 20) < 1.0
    assert measured.cost.byte_seconds == 1 / measured.bandwidth


def test_a_stable_profile_that_agrees_with_steps_is_not_measured_again(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(stable=True)
    assert rig.idle() == 0
    for _ in range(400):
        rig.engine.speculation.step_cost.observe(1, 0, 1.1 * rig.profile.cost(1))
    assert rig.idle() == 0
    assert rig.store.read(rig.profile.subject) == rig.profile


def test_a_profile_that_steps_contradict_for_long_is_measured_again(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(stable=True, factor=3.0)
    for _ in range(400):
        rig.engine.speculation.step_cost.observe(1, 0, rig.profile.cost(1) / 3)
    assert rig.idle() > 2
    assert "factor of" in caplog.text
    assert COMMAND in caplog.text
    assert not rig.engine.speculation.step_cost.contradicted or rig.refresher.profile == rig.profile


def test_a_request_during_a_measurement_waits_for_at_most_one_step(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(stable=False)
    alone_text = rig.serve([3, 5, 7])
    rig.now += IDLE_SECONDS
    assert rig.wait() == 0
    before = rig.measured
    for number in range(3):
        assert rig.wait() == 0
        assert rig.measured == before + number + 1, "a single step each time"
    assert rig.serve([3, 5, 7]) == alone_text
    assert rig.measured == before + 3, "nothing more is measured until the worker is idle again"
    assert rig.wait() == WAIT
    assert rig.idle() > 0
    assert rig.measured == 0


def test_while_another_process_measures_nothing_is_measured(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(stable=False)
    with exclusive_measurement(rig.store.folder, 0.0) as exclusive:
        assert exclusive
        rig.idle()
    assert rig.store.read(rig.profile.subject) == rig.profile
    rig.idle()
    assert rig.store.read(rig.profile.subject) == rig.profile, "after a pause"
    rig.now += FIRST_SECONDS
    rig.idle()
    assert rig.store.read(rig.profile.subject) != rig.profile


def test_errors_are_logged_and_the_worker_continues(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(stable=False)
    for path in rig.store.folder.iterdir():
        path.unlink()
    rig.store.folder.rmdir()
    rig.store.folder.touch()
    rig.idle()
    assert rig.serve([3, 5]) == rig.serve([3, 5])


def test_the_command_names_what_a_profile_depends_on() -> None:
    config = ModelConfig(path="/models/a b", dtype="float32", threads=2)
    assert command_of(config) == "streamserve profile '/models/a b' --dtype float32 --threads 2"
    config = ModelConfig(path="/model", quantization="int8", kv_cache_dtype="int8")
    assert command_of(config) == "streamserve profile /model --quantization int8 --kv-cache-dtype int8"
    config = ModelConfig(path="/model", kernel_path="avx2")
    assert command_of(config) == "streamserve profile /model --kernel-path avx2"
