"""A wheel has several libraries; each processor gets the best one that it can run."""

from itertools import combinations
from pathlib import Path

import pytest

from streamserve.execution.backends.native import levels, packaged
from streamserve.execution.backends.native.build import flags_up_to, kernel_folder
from streamserve.execution.backends.native.levels import (
    LEVELS,
    Level,
    best_level,
    detected_level,
    lesser_level,
    processor_flags,
)
from streamserve.execution.backends.native.packaged import file_name, packaged_library, rates_file
from streamserve.protocol.config import KernelPath
from streamserve.protocol.errors import CheckpointError
from streamserve.system.instructions import KERNEL_PATH_VARIABLE

HASWELL = "fpu sse sse2 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
ALDER_LAKE = f"{HASWELL} avx_vnni"
SKYLAKE = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"
CASCADE_LAKE = f"{SKYLAKE} avx512_vnni"
ZEN_4 = f"{CASCADE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_tile amx_int8 amx_bf16"


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("", "baseline"),
        ("fpu sse sse2 avx", "baseline"),
        (HASWELL.replace("fma", ""), "baseline"),
        (HASWELL, "avx2"),
        (f"{HASWELL} avx512f amx_bf16", "avx2"),
        (ALDER_LAKE, "avx2-vnni"),
        (f"{ALDER_LAKE} avx512f", "avx2-vnni"),
        (SKYLAKE, "avx512"),
        (CASCADE_LAKE, "avx512-vnni"),
        (ZEN_4, "avx512-bf16"),
        (f"{ZEN_4} amx_tile amx_int8", "avx512-bf16"),
        (SAPPHIRE_RAPIDS, "amx"),
        (f"{SAPPHIRE_RAPIDS} avx_vnni", "amx"),
    ],
)
def test_a_processor_gets_the_last_level_of_which_it_has_all(flags: str, name: str) -> None:
    assert best_level(flags.split()).name == name


def test_no_level_needs_less_than_an_earlier_one() -> None:
    for earlier, later in combinations(LEVELS, 2):
        assert not later.needed <= earlier.needed


def test_only_the_vnni_of_256_bits_is_left_out_of_later_levels() -> None:
    for earlier, later in combinations(LEVELS, 2):
        assert earlier.needed - later.needed <= {"avx_vnni"}


@pytest.mark.parametrize(
    ("flags", "bound", "name"),
    [
        (SAPPHIRE_RAPIDS, "portable", "baseline"),
        (SAPPHIRE_RAPIDS, "avx2", "avx2"),
        (SAPPHIRE_RAPIDS, "avx512", "avx512"),
        (SAPPHIRE_RAPIDS, "avx512_bf16", "avx512-bf16"),
        (SAPPHIRE_RAPIDS, "amx", "amx"),
        (ALDER_LAKE, "avx2", "avx2"),
        (ALDER_LAKE, "auto", "avx2-vnni"),
        (HASWELL, "avx2", "avx2"),
        ("", "portable", "baseline"),
    ],
)
def test_a_bound_makes_the_least_processor_with_its_path(flags: str, bound: KernelPath, name: str) -> None:
    """A bound on the path selects the library of the least processor with that path, in particular without
    VNNI, which processors with AVX2 or AVX-512 may lack."""
    assert best_level(flags.split(), bound).name == name


@pytest.mark.parametrize(("flags", "bound"), [(HASWELL, "amx"), (HASWELL, "avx512"), ("", "avx2")])
def test_a_bound_never_raises_what_is_detected(flags: str, bound: KernelPath) -> None:
    with pytest.raises(
        CheckpointError, match=f"STREAMSERVE_KERNEL_PATH = {bound} is not available .*: use auto"
    ):
        best_level(flags.split(), bound)


def test_the_variable_bounds_what_is_detected_packaged_and_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "processor_flags", lambda: frozenset(SAPPHIRE_RAPIDS.split()))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for level in LEVELS:
        (tmp_path / file_name(level)).touch()
    found: dict[str, tuple[Level, str | None, str, str]] = {}
    for bound in ("auto", "avx2", "amx"):
        monkeypatch.setenv(KERNEL_PATH_VARIABLE, bound)
        lesser = lesser_level()
        packaged_file = packaged_library(tmp_path)
        assert packaged_file
        found[bound] = detected_level(), lesser and lesser.name, packaged_file.name, flags_up_to()[0]
    assert found["avx2"] == (LEVELS[1], "avx2", "kernels-avx2.so", "-march=x86-64-v3")
    assert found["amx"] == found["auto"] == (LEVELS[-1], None, "kernels-amx.so", "-march=native")


def test_flags_are_those_of_the_first_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nflags\t\t: fpu avx\nvmx flags\t: ept\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert processor_flags(cpuinfo) == {"fpu", "avx"}
    assert processor_flags(tmp_path / "none") == frozenset()


def test_a_checkout_has_no_libraries_and_a_wheel_one_for_this_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packaged_library(tmp_path) is None
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    mine = tmp_path / file_name(detected_level())
    mine.write_bytes(b"a library")
    assert packaged_library(tmp_path) == mine
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert packaged_library(tmp_path) is None


def test_rates_are_stored_by_library_and_never_next_to_a_packaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rates_file(Path("/cache/1234.so")) == Path("/cache/1234.json")
    monkeypatch.setattr(packaged, "FOLDER", tmp_path)
    library = tmp_path / "kernels-avx2.so"
    library.write_bytes(b"one")
    first = rates_file(library)
    assert first.parent == kernel_folder() / "packaged"
    library.write_bytes(b"another")
    assert rates_file(library) != first
