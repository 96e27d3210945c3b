"""The libraries of all levels that this processor can run give the same bits. Compiling them takes minutes,
so it needs --full."""

from collections.abc import Callable
from functools import cache
from pathlib import Path as Folder

import pytest
import torch

from streamserve.execution.backends.native.build import BuildFailed, build, kernel_folder, level_flags
from streamserve.execution.backends.native.levels import Level
from streamserve.execution.backends.native.library import Path, ThreadPool, load_library
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.backends.native.paths import name_of, numerics_of
from streamserve.execution.formats.quantization import parse_format, quantize
from tests.conftest import Scale
from tests.execution.backends.native.forwarding import logits_of
from tests.execution.backends.native.integer_reference import make, reference
from tests.execution.backends.native.sequences import Sequence
from tests.processor import levels

RUNNABLE = levels()
BUILT = kernel_folder().with_name("native-levels")
"""Where the libraries are compiled, once for all clones; they are kept until the kernels change."""


@cache
def pools(level: Level) -> dict[Path, ThreadPool]:
    """Return the thread pools of a level's library, by its paths for bf16."""
    try:
        library = load_library(build(BUILT, level_flags(level)))
    except BuildFailed as error:
        pytest.skip(str(error))
    made = {path: ThreadPool(library, 2, path) for path in Path}
    return {path: pool for path, pool in made.items() if pool.supports(path, torch.bfloat16)}


@pytest.fixture(autouse=True)
def _compiling_takes_minutes(scale: Scale) -> None:
    if not scale.full:
        pytest.skip("with --full")


def test_each_level_adds_a_path_or_other_integer_instructions() -> None:
    assert [level.name for level in RUNNABLE][:1] == ["baseline"]
    assert [name_of(max(pools(level))) for level in RUNNABLE] == [level.path for level in RUNNABLE]


@pytest.mark.parametrize("level", RUNNABLE, ids=lambda level: level.name)
@pytest.mark.parametrize("format", ["int8", "w8a8", "int4", "int4:32"])
def test_integer_products_are_those_of_the_formula(level: Level, format: str) -> None:
    chosen = parse_format(format)
    assert chosen
    weight = quantize(make(200, 384, 1, torch.bfloat16), chosen)
    for rows in (1, 5, 40, 100):
        x = torch.randn(rows, 384, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
        expected = torch.from_numpy(reference(weight, x))
        assert expected.any()
        for path, pool in pools(level).items():
            assert torch.equal(NativeLinear(pool, weight)(x, wide=True), expected), path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", ["llama", "gemma2"])
def test_logits_of_a_class_of_numerics_have_the_same_bits(
    shared_checkpoint: Callable[..., Folder], variant: str, dtype: torch.dtype
) -> None:
    folder = shared_checkpoint(variant, "bfloat16")
    first: dict[str, torch.Tensor] = {}
    for level in RUNNABLE:
        for path, pool in pools(level).items():
            if not pool.supports(path, dtype):
                continue
            logits = logits_of(folder, [1, 32, 20, 7], dtype, pool)
            assert torch.isfinite(logits).all()
            assert torch.equal(logits, first.setdefault(numerics_of(path), logits)), (level.name, path)


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "int8"])
def test_attention_of_a_class_of_numerics_has_the_same_bits(quantized: bool) -> None:
    first: dict[str, torch.Tensor] = {}
    for level in RUNNABLE:
        for path, pool in pools(level).items():
            sequence = Sequence(pool, 300, torch.bfloat16, dim=64, quantized=quantized)
            chunks = [(0, 200), (200, 99), (299, 1)]
            values = torch.cat(
                [sequence.run(sequence.span(at, n), list(range(at, at + n))) for at, n in chunks]
            )
            assert torch.isfinite(values).all()
            assert torch.equal(values, first.setdefault(numerics_of(path), values)), (level.name, path)
