"""A run reports the lesser processor that its seed chooses, and the tests that were left out."""

from types import SimpleNamespace
from typing import Any

import pytest

from streamserve.system.instructions import KERNEL_PATH_VARIABLE
from tests import processor
from tests.processor import LEFT_OUT, PROPERTY, chosen_path, header, summary


def configuration(seed: int, full: bool = False) -> Any:
    return SimpleNamespace(getoption=lambda name: full, option=SimpleNamespace(randomly_seed=seed))


def test_the_seed_chooses_one_lesser_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "lesser_paths", lambda: ["portable", "avx2", "avx512"])
    monkeypatch.setenv(KERNEL_PATH_VARIABLE, "auto")
    chosen = [chosen_path(configuration(seed)) for seed in range(50)]
    assert chosen == [chosen_path(configuration(seed)) for seed in range(50)]
    assert set(chosen) == {"portable", "avx2", "avx512"}
    assert f"kernel tests also as on one with {chosen[3]}" in header(configuration(3))[0]
    assert chosen_path(configuration(3, full=True)) is None
    monkeypatch.setenv(KERNEL_PATH_VARIABLE, "portable")
    assert chosen_path(configuration(3)) is None
    assert header(configuration(3)) == ["processor: portable, by STREAMSERVE_KERNEL_PATH"]


def test_a_processor_without_a_lesser_one_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "lesser_paths", list)
    monkeypatch.setenv(KERNEL_PATH_VARIABLE, "auto")
    assert chosen_path(configuration(3)) is None


def test_the_end_of_a_run_lists_what_was_left_out() -> None:
    def report(file: str, reason: str = "", when: str = "call", noted: tuple[str, ...] = ()) -> Any:
        skipped = ("file", 1, f"Skipped: {reason}") if reason else None
        properties = [(PROPERTY, what) for what in noted]
        return SimpleNamespace(
            nodeid=f"tests/{file}::test", longrepr=skipped, when=when, user_properties=properties
        )

    stats = {
        "skipped": [
            report("a.py", f"{LEFT_OUT}AMX", "setup"),
            report("b.py", "there is no compiler", "setup"),
        ],
        "passed": [report("b.py", noted=("AMX", "AVX2")), report("a.py")],
        "": [report("b.py", when="teardown", noted=("AMX", "AVX2"))],
    }
    assert summary(stats)[1:] == ["  AMX: 2 in a.py, b.py", "  AVX2: 1 in b.py"]
    assert summary({"passed": [report("a.py")]}) == []
