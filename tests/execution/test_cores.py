"""Workers of one user share out the processors, and get theirs back when one ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamserve.execution.cores import claim

CPUS = sorted(os.sched_getaffinity(0))


def test_two_claims_are_disjoint_and_one_too_many_gets_nothing(tmp_path):
    if len(CPUS) < 2:
        pytest.skip("one processor is all there is")
    first, second = claim(1, tmp_path), claim(len(CPUS) - 1, tmp_path)
    assert first
    assert second
    assert sorted(first.numbers + second.numbers) == CPUS
    assert claim(1, tmp_path) is None
    first.release()
    again = claim(1, tmp_path)
    assert again
    assert again.numbers == first.numbers
    again.release()
    second.release()


def test_a_claim_that_cannot_be_filled_keeps_nothing(tmp_path):
    assert claim(len(CPUS) + 1, tmp_path) is None
    whole = claim(len(CPUS), tmp_path)
    assert whole
    assert list(whole.numbers) == CPUS
    whole.release()


def test_the_end_of_a_process_frees_its_processors(tmp_path):
    code = (
        "import sys; from pathlib import Path; from streamserve.execution.cores import claim\n"
        "print(len(claim(int(sys.argv[2]), Path(sys.argv[1])).numbers), flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, tmp_path, str(len(CPUS))]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == f"{len(CPUS)}\n"
        assert claim(1, tmp_path) is None
        other.kill()
    freed = claim(1, tmp_path)
    assert freed
    freed.release()


def test_without_a_place_for_locks_nobody_gets_any(tmp_path):
    (tmp_path / "file").touch()
    assert claim(1, Path(tmp_path / "file" / "cores")) is None
