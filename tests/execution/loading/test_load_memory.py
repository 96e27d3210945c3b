"""While a model is loaded, its process has little more memory than the weights need, mapped files
included."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamserve.execution.backends.native.library import kernels
from tests.checkpoints import make_checkpoint
from tests.matrix.cells import FORMATS

pytestmark = pytest.mark.skipif(kernels() is None, reason="the kernels are not available")

LIMIT = 1.15
HEAP = {
    "compressed-tensors fp8": 8 << 20,
    "compressed-tensors W4A16": 4 << 20,
    "compressed-tensors W4A16 with zero points": 4 << 20,
}
"""Further bytes, whatever the model's size: freed temporaries that malloc retains, and the temporaries of two
concurrent threads."""
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 36,
    "vocab_size": 512,
}
"""The shape of a model in which a matrix is a small part of the whole, as in large models."""
SMALL = ("bfloat16", "GGUF Q4_K_M", "int4", "AWQ")
"""The formats that also run without --full."""

LOAD = """
import json, sys
from pathlib import Path
from streamserve.execution.loading.load import load
from streamserve.protocol.config import ModelConfig

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

first, model, weights = json.loads(sys.argv[1])
limits = {"threads": 1, "num_blocks": 8, "block_size": 16, "max_num_seqs": 1}
load(ModelConfig(**limits, **first))
Path("/proc/self/clear_refs").write_text("5")
before, files = memory("VmRSS"), memory("RssFile")
loaded = load(ModelConfig(**limits, **model), weights=weights)
print(json.dumps({
    "peak": memory("VmHWM") - before, "weights": loaded.model_info.weight_bytes,
    "mapped": memory("RssFile") - files, "shared": loaded.weights_shared,
}))
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("format", list(FORMATS) if metafunc.config.getoption("--full") else SMALL)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Yield a model with one layer, with which the code is loaded, and the model to measure."""
    folder = tmp_path_factory.mktemp("sources")
    first = make_checkpoint(folder / "first", "llama", **{**SHAPE, "num_hidden_layers": 1})
    return first, make_checkpoint(folder / "model", "llama", **SHAPE)


@pytest.mark.each_value
@pytest.mark.parametrize("shared", [False, True])
def test_the_peak_is_near_that_of_the_weights(
    sources: tuple[Path, Path], tmp_path: Path, format: str, shared: bool, record: Callable[..., None]
) -> None:
    models = []
    for source in sources:
        folder = tmp_path / source.name
        folder.mkdir()
        written = FORMATS[format](source, folder)
        models.append({"dtype": "auto", "path": str(written.path), **written.settings})
    names = ("target", "draft") if shared else ()
    descriptors = [os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in names]
    argument = json.dumps([*models, descriptors])
    done = subprocess.run(
        [sys.executable, "-c", LOAD, argument],
        pass_fds=descriptors,
        capture_output=True,
        check=False,
        text=True,
    )
    for descriptor in descriptors:
        os.close(descriptor)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["shared"] == shared
    assert measured["weights"] > 50e6
    assert measured["mapped"] < 0.05 * measured["weights"]
    assert measured["peak"] < LIMIT * measured["weights"] + HEAP.get(format, 0), measured
    assert measured["peak"] > 0.9 * measured["weights"], "the measured memory was used by loading"
    record(format=format, shared=shared, ratio=round(measured["peak"] / measured["weights"], 3))
