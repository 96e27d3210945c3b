"""The kernels use the best instructions of the processor, or those that are asked for."""

import ctypes
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path as FilePath

import pytest
import torch

from streamserve import __version__
from streamserve.execution.backends.native.levels import detected_level
from streamserve.execution.backends.native.library import Path, ThreadPool, kernels, load_library
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.backends.native.paths import best_path, choose, multiplier_rate, name_of
from streamserve.execution.formats.quantization import WeightFormat, quantize
from streamserve.execution.loading.load import load
from streamserve.execution.profile.measure import seconds_of
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from tests.conftest import Scale
from tests.execution.backends.native import paths as names
from tests.processor import leave_out

MakePool = Callable[..., ThreadPool]
Available = Callable[[ThreadPool, torch.dtype], list[Path]]


@pytest.fixture
def library(tmp_path: FilePath) -> ctypes.CDLL:
    """Return a copy of the kernels in a folder without stored choices."""
    built = kernels()
    if built is None:
        pytest.skip("there is no compiler")
    return load_library(FilePath(shutil.copy(built._name, tmp_path)))


def stored(library: ctypes.CDLL) -> FilePath:
    return FilePath(library._name).with_suffix(".json")


@pytest.mark.parametrize("path", [path for path in Path if path is not Path.PORTABLE])
@pytest.mark.parametrize("bits", [16, 8])
def test_a_product_is_not_faster_than_the_multipliers(pool: MakePool, path: Path, bits: int) -> None:
    """A product is not faster than the multipliers' rate, so the rate counts all multipliers. Other processes
    may slow either measurement, so both are repeated until they fit."""
    rows, shape = 192, (1024, 1024)
    threads = pool(1, path)
    weight = torch.randn(shape).bfloat16()
    stored = weight if bits == 16 else quantize(weight, WeightFormat(8, 128, symmetric=True))
    linear, x = NativeLinear(threads, stored, dtype=weight.dtype), torch.randn(rows, shape[1]).bfloat16()
    seconds = min(seconds_of(lambda: linear(x)) for _ in range(5))
    rates = (multiplier_rate(threads, path, bits) for _ in range(30))
    assert any(2 * rows * shape[0] * shape[1] / seconds < 1.4 * rate for rate in rates)


def test_a_processor_has_the_path_of_its_level_and_no_later_one(
    pool: MakePool, request: pytest.FixtureRequest
) -> None:
    """A processor has the path of its level and no later one, also with a lesser processor's kernels, which
    lack that processor's missing paths."""
    level = detected_level(names.repeated(request.node))
    assert max(path for path in Path if pool(1).supports(path, torch.bfloat16)) is Path[level.path.upper()]


def test_the_portable_path_has_no_rate(pool: MakePool) -> None:
    assert multiplier_rate(pool(1), Path.PORTABLE) == 0


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({Path.AVX512: 167e9, Path.AVX512_BF16: 80e9}, Path.AVX512),
        ({Path.AVX512: 118e9, Path.AVX512_BF16: 236e9}, Path.AVX512_BF16),
        ({Path.AVX512: 167e9, Path.AVX512_BF16: 80e9, Path.AMX: 1800e9}, Path.AMX),
        ({Path.PORTABLE: 0.0, Path.AVX2: 90e9}, Path.AVX2),
        ({Path.PORTABLE: 0.0}, Path.PORTABLE),
        ({Path.AVX2: 92e9, Path.AVX512: 90e9}, Path.AVX512),
        ({Path.AVX2: 120e9, Path.AVX512: 90e9}, Path.AVX2),
    ],
    ids=["slow bf16 dot product", "fast one", "tiles", "avx2", "portable", "as fast", "slower"],
)
def test_the_fastest_path_is_chosen(rates: dict[Path, float], chosen: Path) -> None:
    assert choose(rates) is chosen


def test_rates_are_stored_and_never_measured_again(library: ctypes.CDLL) -> None:
    first = best_path(library)
    rates = json.loads(stored(library).read_text())["by_path"]
    assert first is not None
    assert max(Path[name.upper()] for name in rates) >= first
    stored(library).write_text(json.dumps({"by_path": {"portable": 1.0, "avx2": 1e15}}))
    best_path.cache_clear()  # as another process stores it
    supported = {path for path in Path if ThreadPool(library, 1).supports(path, torch.bfloat16)}
    assert best_path(library) is (Path.AVX2 if Path.AVX2 in supported else Path.PORTABLE)


def test_processes_that_start_together_make_one_choice(library: ctypes.CDLL, scale: Scale) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from streamserve.execution.backends.native import library, paths;"
        "print(paths.best_path(library.load_library(Path(sys.argv[1]))))"
    )
    starts = [
        subprocess.Popen([sys.executable, "-c", code, library._name], stdout=subprocess.PIPE, text=True)
        for _ in range(scale.pick(2, 3))
    ]
    assert len({process.communicate()[0] for process in starts}) == 1
    assert not any(process.returncode for process in starts)
    assert sorted(file.suffix for file in stored(library).parent.iterdir() if file.suffix) == [".json", ".so"]


@pytest.mark.parametrize("text", ["", "{}", '{"by_path": {"avx2": "fast"}}', '{"by_path": 3}'])
def test_stored_rates_that_cannot_be_used_are_replaced(library: ctypes.CDLL, text: str) -> None:
    stored(library).write_text(text)
    best_path(library)
    assert "portable" in json.loads(stored(library).read_text())["by_path"]


def test_rates_that_cannot_be_stored_are_used(library: ctypes.CDLL, caplog: pytest.LogCaptureFixture) -> None:
    stored(library).mkdir()
    with caplog.at_level(logging.WARNING):
        assert best_path(library) in Path
    assert "cannot be stored" in caplog.text
    assert [file.name for file in stored(library).parent.glob("*.tmp")] == []


def test_a_path_can_be_forced(
    shared_checkpoint: Callable[..., FilePath], pool: MakePool, available: Available
) -> None:
    folder = str(shared_checkpoint())
    for path in available(pool(1), torch.float32):
        config = ModelConfig(path=folder, threads=1, num_blocks=9, kernel_path=name_of(path), draft="none")
        loaded = load(config)
        assert loaded.model_info.backend == f"native {name_of(path)}"
        assert all(layer.down.struct.path == path for layer in loaded.model.layers)
        own = "native portable" if path == Path.PORTABLE else "native"
        assert loaded.model_info.numerics == f"{own}, float32, streamserve {__version__}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("numerics", "own"), [("native", "native"), ("portable", "native portable")])
def test_a_class_of_bits_can_be_chosen_for_unlike_machines(
    shared_checkpoint: Callable[..., FilePath], pool: MakePool, numerics: str, own: str, dtype: str
) -> None:
    if numerics == "native" and not pool(1).supports(Path.AVX2, torch.bfloat16):
        leave_out(names.name_of(Path.AVX2, torch.bfloat16))
    folder = str(shared_checkpoint())
    config = ModelConfig(path=folder, threads=1, num_blocks=9, numerics=numerics, dtype=dtype, draft="none")
    assert load(config).model_info.numerics == f"{own}, {dtype}, streamserve {__version__}"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kernel_path": "amx", "dtype": "float32"}, "use auto, portable"),
        ({"kernel_path": "portable", "backend": "reference"}, "--backend native"),
        ({"kernel_path": "portable", "backend": "device"}, "--device cpu"),
        ({"numerics": "native", "backend": "reference"}, "--backend native"),
        ({"numerics": "portable", "backend": "device"}, "--device cpu"),
        ({"numerics": "native", "kernel_path": "portable"}, "is not in the class --numerics native"),
    ],
)
def test_a_path_that_is_not_there_is_refused(
    shared_checkpoint: Callable[..., FilePath], settings: dict[str, str], named: str
) -> None:
    if kernels() is None:
        pytest.skip("there is no compiler")
    with pytest.raises(CheckpointError, match=named):
        load(ModelConfig(path=str(shared_checkpoint()), threads=1, num_blocks=9, **settings))
