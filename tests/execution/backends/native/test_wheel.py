"""The kernels in the wheel of `make wheel` compute the bits of a local build, and need no compiler."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.build_wheel import path_in_wheel
from streamserve.execution.backends.native.build import BuildFailed, build
from streamserve.execution.backends.native.levels import LEVELS, Level, detected_level
from streamserve.execution.backends.native.library import Path as KernelPath
from streamserve.execution.backends.native.library import ThreadPool, load_library
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.backends.native.packaged import file_name
from streamserve.execution.formats.quantization import parse_format, quantize
from tests.execution.backends.native.forwarding import logits_of
from tests.execution.backends.native.sequences import Sequence
from tests.execution.backends.native.wheel import built_wheel
from tests.processor import levels

RUNNABLE = levels()


@pytest.fixture(scope="module")
def wheel() -> Path:
    return built_wheel()


def test_libraries_are_where_the_package_looks_for_them() -> None:
    """Libraries are where the package looks for them. This is tested without a built wheel, which takes
    minutes."""
    for level in LEVELS:
        assert path_in_wheel(level) == f"streamserve/execution/backends/native/compiled/{file_name(level)}"


Pools = Callable[[KernelPath], tuple[ThreadPool, ThreadPool]]


@pytest.fixture(params=RUNNABLE, ids=lambda level: level.name, scope="module")
def pools(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Pools:
    """Return the thread pools of a packaged library and of the library compiled here, by path."""
    level: Level = request.param
    name = f"streamserve/execution/backends/native/compiled/{file_name(level)}"
    with zipfile.ZipFile(wheel) as archive:
        packaged = load_library(Path(archive.extract(name, tmp_path_factory.mktemp("wheel"))))
    try:
        local = load_library(build())
    except BuildFailed as error:
        pytest.skip(str(error))
    return lambda path: (ThreadPool(packaged, 2, path), ThreadPool(local, 2, path))


@pytest.mark.parametrize("path", KernelPath)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_logits_of_models_have_the_same_bits(
    shared_checkpoint: Callable[..., Path], pools: Pools, path: KernelPath, dtype: torch.dtype
) -> None:
    packaged, local = pools(path)
    if not packaged.supports(path, dtype):
        pytest.skip(f"not in this library: {path.name}")
    for variant in ("llama", "gemma2"):
        folder = shared_checkpoint(variant, "bfloat16")
        logits = logits_of(folder, [1, 32, 20, 7], dtype, packaged)
        assert torch.isfinite(logits).all()
        assert torch.equal(logits, logits_of(folder, [1, 32, 20, 7], dtype, local))


@pytest.mark.parametrize("path", KernelPath)
@pytest.mark.parametrize("format", ["int8", "int4", "int4:32"])
def test_quantized_weights_give_the_same_bits(pools: Pools, path: KernelPath, format: str) -> None:
    packaged, local = pools(path)
    if not packaged.supports(path, torch.bfloat16):
        pytest.skip(f"not in this library: {path.name}")
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(200, 384, generator=generator).to(torch.bfloat16)
    chosen = parse_format(format)
    assert chosen
    for rows in (1, 5, 40, 100):
        x = torch.randn(rows, 384, generator=generator).to(torch.bfloat16)
        y = NativeLinear(packaged, quantize(weight, chosen))(x, wide=True)
        assert y.any()
        assert torch.equal(y, NativeLinear(local, quantize(weight, chosen))(x, wide=True))


@pytest.mark.parametrize("path", KernelPath)
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "int8"])
def test_attention_gives_the_same_bits(pools: Pools, path: KernelPath, quantized: bool) -> None:
    packaged, local = pools(path)
    if not packaged.supports(path, torch.bfloat16):
        pytest.skip(f"not in this library: {path.name}")
    results = []
    for pool in (packaged, local):
        sequence = Sequence(pool, 300, torch.bfloat16, dim=64, quantized=quantized)
        chunks = [(0, 200), (200, 70), (270, 29), (299, 1)]
        parts = [sequence.run(sequence.span(at, n), list(range(at, at + n))) for at, n in chunks]
        results.append(torch.cat(parts))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(*results)


def test_installed_where_there_is_no_compiler_it_generates_text(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    cache = tmp_path / "cache"
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "PYTHONPATH")}
    environment = kept | {"PATH": str(folder / "bin"), "XDG_CACHE_HOME": str(cache)}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "unavailable" not in done.stderr
        return done.stdout.strip()

    library = run(str(python), "-m", "streamserve.execution.backends.native")
    compiled = packages / "streamserve" / "execution" / "backends" / "native" / "compiled"
    assert Path(library) == compiled / file_name(detected_level())
    command = ["generate", "What is 12 + 7?", "--max-tokens", "4", "--threads", "1", "--no-profile"]
    assert run(str(folder / "bin" / "streamserve"), *command, "--backend", "native")
    assert not list(cache.rglob("*.so"))
