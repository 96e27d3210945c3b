"""With kernels, several workers share one copy of the weights; without, each worker has its own copy."""

from pathlib import Path

import msgspec
import pytest

from streamserve.execution.backends.native.library import kernels
from streamserve.execution.loading.footprint import footprint
from streamserve.protocol.config import ModelConfig
from tests.checkpoints import make_checkpoint


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_shared_weights_are_counted_once(tmp_path: Path, backend: str) -> None:
    if backend == "native" and kernels() is None:
        pytest.skip("the kernels are not available")
    config = ModelConfig(path=str(make_checkpoint(tmp_path)), backend=backend, max_num_seqs=4)
    one, three = (footprint(config, 1 << 21, 0.4, workers) for workers in (1, 3))
    assert three.weights == one.weights * (1 if backend == "native" else 3)
    assert three.num_blocks < one.num_blocks, "the workers divide the memory"
    assert three.weights + three.kv_cache <= 1 << 21
    block_bytes = one.kv_cache // one.num_blocks
    assert three.kv_cache == 3 * three.num_blocks * block_bytes


def test_the_memory_for_adapters_is_counted_in_each_worker(tmp_path: Path) -> None:
    config = ModelConfig(path=str(make_checkpoint(tmp_path)), num_blocks=8)
    reserved = msgspec.structs.replace(config, max_loras=2, max_lora_bytes=1000)
    plain, one, three = (
        footprint(model, 1 << 24, 0.4, workers)
        for model, workers in ((config, 1), (reserved, 1), (reserved, 3))
    )
    assert (plain.adapters, one.adapters, three.adapters) == (0, 1000, 3000)
    assert (one.weights, one.kv_cache) == (plain.weights, plain.kv_cache)
