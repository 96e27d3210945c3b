"""Profiles are measured within the model's limits, stored by machine and model, and never delay a server."""

import itertools
import logging
import math
import os
import re
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import Span
from streamserve.contracts.tree import root
from streamserve.execution.backends.native.library import Path as KernelPath
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.profile.floor import floor_of, step_floor
from streamserve.execution.profile.lock import exclusive_measurement
from streamserve.execution.profile.measure import (
    Effort,
    Series,
    load_or_measure_profile,
    measure,
    rounds_agree,
    run_rounds,
    subject_of,
)
from streamserve.execution.profile.profile import MAX_BYTES, ProfileStore, this_machine, user_profiles
from streamserve.execution.profile.steps import Point, Steps, grid_points, span_points
from streamserve.protocol.config import ModelConfig
from streamserve.system.instructions import KERNEL_PATH_VARIABLE
from tests.execution.profiles import SUBJECT, profile_of
from tests.processor import lesser_paths

SMALL = Effort((1, 2, 8), (0, 20, 6144), span=4, matrix_rows=(2,), rounds=2, seconds=60.0)


@pytest.fixture(params=["auto", "reference"])
def loaded(request: pytest.FixtureRequest, shared_checkpoint: Callable[..., Path]) -> Loaded:
    path = str(shared_checkpoint())
    return load(
        ModelConfig(path=path, threads=1, num_blocks=4, max_model_len=50, backend=request.param, draft="none")
    )


def test_a_measured_profile_is_a_whole_grid_within_the_models_limits(loaded: Loaded) -> None:
    reported = []
    (profile,) = measure([("tiny", loaded)], SMALL, lambda done, total: reported.append((done, total)))
    assert profile.cost.tokens == (1, 2, 8)
    assert profile.kv_token_bytes == 2 * 2 * 2 * 16 * 4  # layers, k and v, heads, dim, bytes
    assert profile.cost.kv_bytes == (0, 20 * 512, 49 * 512)
    assert (profile.rounds, profile.quick, profile.model) == (2, False, "tiny")
    assert profile.subject == subject_of(loaded)
    assert min(profile.bandwidth, profile.matrix_rate, profile.peak_rate) > 0
    path = loaded.pool.path(loaded.model.dtype) if loaded.pool else KernelPath.PORTABLE
    assert (profile.multiplier_rate > 0) == (path != KernelPath.PORTABLE), "portable code has no such rate"
    assert profile.cost.byte_seconds == 1 / profile.bandwidth
    assert [len(line) for line in profile.floor] == [3, 3, 3]
    assert profile.swap is not None
    for copy in (profile.swap.out, profile.swap.back):  # seconds by bytes of KV
        assert 0 < copy(1 << 20) <= copy(1 << 30)
    assert [done for done, _ in reported] == list(range(1, reported[0][1] + 1))


def test_no_step_beats_its_floor(loaded: Loaded) -> None:
    """No step is faster than its floor: if a step was faster than the measured memory and matrix rates
    predict, the rates are raised."""
    (profile,) = measure([("tiny", loaded)], SMALL)
    points = grid_points(SMALL.query_tokens, SMALL.contexts, loaded.engine_config, 1000)
    plans = Steps(loaded, [point for line in points for point in line]).plans
    floor = floor_of(loaded, profile)
    for line, floors in zip(points, profile.floor, strict=True):
        assert [floor(plans[point]) for point in line] == pytest.approx(floors)
    for floors, seconds in zip(profile.floor, profile.cost.seconds, strict=True):
        assert all(low <= cost * (1 + 1e-9) for low, cost in zip(floors, seconds, strict=True))


def test_a_profile_with_kv_of_8_bits_is_another_subject(shared_checkpoint: Callable[..., Path]) -> None:
    """A profile with 8-bit KV is stored separately: a step's lower bound counts the bytes of KV as they are
    stored."""
    path, profiles, reads = str(shared_checkpoint()), [], []
    for kv in ("auto", "int8"):
        loaded = load(ModelConfig(path=path, threads=1, num_blocks=4, max_model_len=50, kv_cache_dtype=kv))
        profiles += measure([("tiny", loaded)], replace(SMALL, rounds=1))
        step = [Span(0, 30, [0], [0, 1], root(0), (0,))]
        reads.append(step_floor(loaded, 1.0, 1.0).work(step).bytes)
    plain, quantized = profiles
    assert (plain.subject.dtype, quantized.subject.dtype) == ("float32", "float32-kv-int8")
    assert plain.subject.fingerprint != quantized.subject.fingerprint
    assert plain.kv_token_bytes == 2 * 2 * 2 * 16 * 4  # layers, k and v, heads, dim, bytes
    assert quantized.kv_token_bytes == 2 * 2 * 2 * (16 + 4)
    assert quantized.weight_bytes == plain.weight_bytes
    assert reads[0] - reads[1] == 31 * (plain.kv_token_bytes - quantized.kv_token_bytes)


def test_measuring_leaves_the_models_own_cache_alone(loaded: Loaded) -> None:
    cache = loaded.executor._cache.data
    cache.fill_(7.0)
    measure([("tiny", loaded)], replace(SMALL, rounds=1))
    assert (cache == 7.0).all()


def test_models_are_measured_in_the_same_rounds(shared_checkpoint: Callable[..., Path]) -> None:
    models = [
        (str(seed), load(ModelConfig(path=str(shared_checkpoint(seed=seed)), threads=1, num_blocks=8)))
        for seed in (0, 1)
    ]
    first, second = measure(models, replace(SMALL, rounds=1))
    assert (first.model, second.model) == ("0", "1")
    assert first.subject.fingerprint != second.subject.fingerprint


def test_after_the_time_limit_only_required_points_are_measured(loaded: Loaded) -> None:
    (profile,) = measure([("tiny", loaded)], replace(SMALL, seconds=0.0))
    assert profile.cost.tokens == (1, 2)
    assert profile.rounds == 2, "measured again, to have two values to compare"
    assert profile.cost(512) >= 510 * profile.cost.token_seconds > 0


def test_rounds_are_interleaved_and_warmed_up_once() -> None:
    calls: list[str] = []

    def slow(name: str) -> Callable[[], None]:
        def call() -> None:
            calls.append(name)
            while not calls:
                pass

        return call

    series = [Series(slow("b"), 2), Series(slow("a"), 1)]
    run_rounds(series, replace(SMALL, rounds=3), lambda: None)
    order = [name for name, before in zip(calls, [None, *calls], strict=False) if name != before]
    assert order == ["a", "b"] * 3
    assert [len(measured.seconds) for measured in series] == [3, 3]


@given(st.integers(1, 600), st.integers(0, 7000), st.integers(1, 64), st.integers(1, 64))
def test_points_spread_evenly_and_count_their_blocks(
    query_tokens: int, context: int, sequences: int, size: int
) -> None:
    point = Point(query_tokens, context, min(sequences, query_tokens))
    shares = point.shares()
    assert [sum(column) for column in zip(*shares, strict=True)] == [query_tokens, context]
    assert all(max(column) - min(column) <= 1 for column in zip(*shares, strict=True))
    assert point.blocks(size) == sum(math.ceil((r + c) / size) for r, c in shares)


@given(
    st.integers(2, 9000),
    st.integers(1, 64),
    st.integers(1, 1024),
    st.sampled_from([1, 16]),
    st.integers(1, 2000),
)
def test_points_respect_the_engines_limits(
    length: int, seqs: int, budget: int, size: int, max_blocks: int
) -> None:
    limits = EngineConfig(
        num_blocks=1, block_size=size, max_model_len=length, max_num_seqs=seqs, max_num_batched_tokens=budget
    )
    lines = grid_points((1, 8, 64, 512), (0, 512, 6144), limits, max_blocks)
    spans = span_points(32, 6144, limits, max_blocks)
    assert lines[0][0] == Point(1, 0, 1)
    assert len({tuple(point.context for point in line) for line in lines}) == 1
    for point in [*(point for line in lines for point in line), *spans]:
        assert point.sequences <= seqs
        assert point.query_tokens <= budget
        assert point.blocks(size) <= max_blocks
        assert all(query_tokens + context <= length for query_tokens, context in point.shares())


def test_a_stored_profile_is_found_by_its_subject(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "profiles")
    assert store.read(SUBJECT) is None
    path = store.write(profile_of())
    assert path.name == "some-cpu-2-0ghz-4c-2t-0123456789abcdef-bfloat16-native-01234567.json"
    assert store.read(SUBJECT) == profile_of()
    assert list(store.folder.iterdir()) == [path]
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert store.read(msgspec.structs.replace(SUBJECT, dtype="float32")) is None


def test_a_new_profile_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    store.write(profile_of(quick=True))
    store.write(profile_of(quick=False))
    assert store.read(SUBJECT) == profile_of(quick=False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated"),
        (b'{"subject": 1}', "subject"),
        (b" " * (MAX_BYTES + 1), "not a file of at most"),
        (msgspec.json.encode(profile_of()).replace(b"[1,2]", b"[2,1]"), "must ascend"),
    ],
)
def test_a_damaged_file_is_logged_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, words: str
) -> None:
    store = ProfileStore(tmp_path)
    store.path(SUBJECT).write_bytes(content)
    assert store.read(SUBJECT) is None
    assert words in caplog.text


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ProfileStore(tmp_path)
    os.mkfifo(store.path(SUBJECT))
    assert store.read(SUBJECT) is None
    assert "not a file of at most" in caplog.text


def test_a_file_of_something_else_is_not_used(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    other = msgspec.structs.replace(SUBJECT, fingerprint=SUBJECT.fingerprint[:16] + "other")
    store.write(profile_of(other))
    assert store.path(other) == store.path(SUBJECT)
    assert store.read(SUBJECT) is None
    store.write(profile_of(format=99))
    assert store.read(SUBJECT) is None


def test_the_first_start_measures_and_later_ones_read(
    shared_checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loaded = load(ModelConfig(path=str(shared_checkpoint()), threads=1, num_blocks=8))
    store = ProfileStore(tmp_path / "profiles")
    first = load_or_measure_profile("tiny", loaded, store)
    assert first is not None
    assert first.quick
    assert re.fullmatch(
        r"measured this machine, once, in \d+\.\d s \(--no-profile leaves it out\)", caplog.messages[-1]
    )
    caplog.clear()
    assert load_or_measure_profile("tiny", loaded, store) == first
    assert not caplog.text


def test_a_profile_that_another_process_has_measured_meanwhile_is_not_measured_again(
    shared_checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A profile that another process has just measured is not measured again: when two halves of a pair start
    at once, the second waits and uses the first's profile."""
    caplog.set_level(logging.INFO)
    loaded = load(ModelConfig(path=str(shared_checkpoint()), threads=1, num_blocks=8))
    caplog.clear()
    store = ProfileStore(tmp_path / "profiles")
    with ThreadPoolExecutor(1) as pool:
        with exclusive_measurement(store.folder, 0.0) as exclusive:
            assert exclusive
            second = pool.submit(load_or_measure_profile, "tiny", loaded, store)
            store.write(profile_of(subject_of(loaded)))
        assert second.result(30) == profile_of(subject_of(loaded))
    assert not caplog.text


def test_after_the_wait_it_measures_and_reports_the_profile_as_unstable(
    shared_checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    loaded = load(ModelConfig(path=str(shared_checkpoint()), threads=1, num_blocks=8))
    store = ProfileStore(tmp_path / "profiles")
    with exclusive_measurement(store.folder, 0.0):
        profile = load_or_measure_profile("tiny", loaded, store, wait=0.1)
    assert profile is not None
    assert not profile.stable
    assert "(unstable)" in caplog.text


@pytest.mark.parametrize(
    ("rounds", "stable"),
    [
        ([(1.0, 1.02), (2.0, 2.1)], True),
        ([(1.0, 1.02), (2.0, 2.1), (3.0, 4.5)], False),
        ([(1.0, 1.1), (2.0, 2.2)], False),
        ([(1.0, 5.0, 1.02, 1.01, 1.0, 1.03)], True),
        ([(1.0,)], False),
    ],
    ids=["agree", "one far apart", "all apart", "one hiccup", "one round"],
)
def test_rounds_that_differ_are_not_stable(rounds: list[tuple[float, ...]], stable: bool) -> None:
    assert rounds_agree([Series(lambda: None, 0, seconds=list(measured)) for measured in rounds]) == stable


def test_rounds_are_repeated_until_they_agree_and_not_for_ever() -> None:
    waits = itertools.cycle([0.005, 0.02])
    series = Series(lambda: time.sleep(next(waits)), 0)
    run_rounds([series], replace(SMALL, rounds=2, max_rounds=6), lambda: None)
    assert len(series.seconds) == 6
    assert not rounds_agree([series])


def test_a_failed_profile_does_not_prevent_serving(
    shared_checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(ModelConfig(path=str(shared_checkpoint()), threads=1, num_blocks=8))
    (tmp_path / "file").touch()
    assert load_or_measure_profile("tiny", loaded, ProfileStore(tmp_path / "file" / "profiles")) is None
    assert "served without a profile" in caplog.text


def test_profiles_lie_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_profiles().folder == tmp_path / "streamserve" / "profiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_profiles().folder == tmp_path / ".cache" / "streamserve" / "profiles"


def test_a_processor_that_is_taken_for_a_lesser_one_has_profiles_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KERNEL_PATH_VARIABLE, "auto")
    machine = this_machine(1)
    for path in lesser_paths():
        monkeypatch.setenv(KERNEL_PATH_VARIABLE, path)
        assert this_machine(1) == msgspec.structs.replace(
            machine, processor=f"{machine.processor} up to {path}"
        )


def test_a_machine_is_known_by_its_processor_cores_and_threads(loaded: Loaded) -> None:
    """A machine is identified by its processor, cores and threads, and not by the cores that a worker is
    pinned to."""
    machine = subject_of(loaded).machine
    assert machine.processor
    assert (machine.cores, machine.threads) == (os.cpu_count(), 1)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert subject_of(loaded).machine == machine
    finally:
        os.sched_setaffinity(0, allowed)
