"""Without `swap_space` there is a host pool if copies were measured, bounded by the remaining memory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamserve.contracts.cost import Line, SwapCost
from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import StepPlan
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.profile.default_swap import SPARE_FRACTION, default_swap_blocks, with_default_swap
from streamserve.execution.profile.profile import Profile
from streamserve.llm.memory_plan import with_planned_pool
from streamserve.protocol.config import ModelConfig
from streamserve.settings.resolve import resolve
from tests.checkpoints import make_checkpoint
from tests.execution.profiles import profile_of

BLOCK_BYTES = 1 << 20


def limits(**fields: object) -> EngineConfig:
    return EngineConfig(**{"num_blocks": 1000, "max_num_seqs": 64, "max_model_len": 2048, **fields})


def test_it_is_bounded_by_the_caches_size_and_by_the_memory_that_is_left() -> None:
    assert default_swap_blocks(limits(), BLOCK_BYTES, 1 << 50) == 1000, "no larger than the cache"
    spare = 800 * BLOCK_BYTES
    assert default_swap_blocks(limits(), BLOCK_BYTES, spare) == SPARE_FRACTION * 800
    assert default_swap_blocks(limits(), BLOCK_BYTES, 3 * BLOCK_BYTES) == 0


def test_it_holds_no_more_than_the_cache_lacks() -> None:
    contexts = 64 * 2048 // 16
    assert default_swap_blocks(limits(num_blocks=contexts - 5), BLOCK_BYTES, 1 << 50) == 5
    assert default_swap_blocks(limits(num_blocks=contexts), BLOCK_BYTES, 1 << 50) == 0
    assert default_swap_blocks(limits(num_blocks=contexts + 9), BLOCK_BYTES, 1 << 50) == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("default-swap"))


@pytest.fixture
def load_with(checkpoint: Path) -> Iterator[Callable[..., tuple[Loaded, ModelConfig]]]:
    opened = []

    def load_with(**settings: object) -> tuple[Loaded, ModelConfig]:
        config = ModelConfig(path=str(checkpoint), **{"threads": 1, "num_blocks": 40, **settings})
        opened.append(load(config))
        return opened[-1], config

    yield load_with
    for loaded in opened:
        loaded.executor.close()


MEASURED = profile_of(swap=SwapCost(Line(1e-4, 1e-9), Line(1e-4, 1e-9)))


def test_a_measured_worker_can_swap_by_default(load_with: Callable[..., tuple[Loaded, ModelConfig]]) -> None:
    loaded, config = load_with()
    assert loaded.engine_config.swap_blocks == 0
    block_bytes = loaded.kv_cache_bytes // 40
    swapping = with_default_swap(loaded, config, MEASURED)
    assert swapping.engine_config.swap_blocks == 40
    assert 40 * block_bytes <= SPARE_FRACTION * loaded.spare_bytes
    swapping.executor.run(StepPlan(1, [], [], [], [], swap_out=[(0, 39)]))
    with pytest.raises(IndexError):
        swapping.executor.run(StepPlan(2, [], [], [], [], swap_out=[(0, 40)]))


@pytest.mark.parametrize(
    ("settings", "measured"),
    [
        ({}, None),
        ({}, profile_of(swap=None)),
        ({"swap_space": 0.0}, MEASURED),
        ({"swap_space": 0.001}, MEASURED),
        ({"eviction": "recompute"}, MEASURED),
    ],
)
def test_it_is_left_out_where_nothing_was_measured_or_the_settings_decide(
    load_with: Callable[..., tuple[Loaded, ModelConfig]],
    settings: dict[str, object],
    measured: Profile | None,
) -> None:
    loaded, config = load_with(**settings)
    assert with_default_swap(loaded, config, measured) is loaded


def test_what_is_left_is_what_weights_pools_and_swap_space_do_not_take(
    load_with: Callable[..., tuple[Loaded, ModelConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamserve.execution.loading.load.available_bytes", lambda: 1 << 30)
    small, large, swapping = (load_with(**settings)[0] for settings in SIZES)
    block = small.kv_cache_bytes // 40
    assert small.spare_bytes - large.spare_bytes == 60 * block
    assert small.spare_bytes - swapping.spare_bytes == swapping.engine_config.swap_blocks * block > 0
    assert 0 < small.spare_bytes < 1 << 30


def test_without_memory_for_it_the_worker_starts_and_recomputes(
    load_with: Callable[..., tuple[Loaded, ModelConfig]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("streamserve.execution.profile.default_swap.HostPool", refuse)
    loaded, config = load_with()
    assert with_default_swap(loaded, config, MEASURED) is loaded
    assert "evicted KV is recomputed" in caplog.text


SIZES: tuple[dict[str, object], ...] = ({}, {"num_blocks": 100}, {"swap_space": 0.01})


def test_models_that_share_a_budget_swap_only_where_they_were_asked_to() -> None:
    for given, planned in ((None, 0.0), (0.25, 0.25)):
        overrides = {} if given is None else {"swap_space": given}
        settings = with_planned_pool(resolve("embedded", overrides, environ={}), 100)
        assert (settings.model.num_blocks, settings.model.swap_space) == (100, planned)
