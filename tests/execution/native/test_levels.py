"""Which of a wheel's libraries a processor gets."""

from itertools import combinations
from pathlib import Path

import pytest

from streamserve.execution.native import packaged
from streamserve.execution.native.build import cache_folder
from streamserve.execution.native.levels import LEVELS, best_level, processor_flags
from streamserve.execution.native.packaged import file_name, packaged_library, rates_file

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
    mine = tmp_path / file_name(best_level(processor_flags()))
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
    assert first.parent == cache_folder() / "packaged"
    library.write_bytes(b"another")
    assert rates_file(library) != first
