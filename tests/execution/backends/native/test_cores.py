"""Workers of one user divide the processors among them, and get processors back when a worker ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamserve.execution.backends.native.cores import reserve_cores
from streamserve.system.processors import Processors

CPUS = sorted(os.sched_getaffinity(0))


def test_reservations_are_disjoint_and_fail_when_no_processor_is_free(tmp_path):
    if len(CPUS) < 2:
        pytest.skip("one processor is all there is")
    first, second = reserve_cores(1, tmp_path), reserve_cores(len(CPUS) - 1, tmp_path)
    assert first
    assert second
    assert sorted(first.cpus + second.cpus) == CPUS
    assert reserve_cores(1, tmp_path) is None
    first.release()
    again = reserve_cores(1, tmp_path)
    assert again
    assert again.cpus == first.cpus
    again.release()
    second.release()


def test_a_reservation_that_fails_holds_no_processor(tmp_path):
    assert reserve_cores(len(CPUS) + 1, tmp_path) is None
    whole = reserve_cores(len(CPUS), tmp_path)
    assert whole
    assert list(whole.cpus) == CPUS
    whole.release()


def test_a_worker_gets_processors_of_one_numa_node_where_it_fits(tmp_path):
    """A worker gets processors of one NUMA node if it fits. Of six processors, node 0 has three (the even
    ones), too few after the first worker; so the second worker gets node 1, and a worker that fits on neither
    node gets what both have left."""
    usable = Processors((0, 1, 2, 3, 4, 5), nodes=(0, 1, 0, 1, 0, 1))
    workers = [reserve_cores(2, tmp_path, usable) for _ in range(3)]
    assert [worker and worker.cpus for worker in workers] == [(0, 2), (1, 3), (4, 5)]
    assert reserve_cores(1, tmp_path, usable) is None
    workers[1].release()
    assert reserve_cores(3, tmp_path, usable) is None
    again = reserve_cores(2, tmp_path, usable)
    assert again.cpus == (1, 3)
    for reserved in (workers[0], workers[2], again):
        reserved.release()


def test_the_end_of_a_process_frees_its_processors(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from streamserve.execution.backends.native.cores import reserve_cores\n"
        "print(len(reserve_cores(int(sys.argv[2]), Path(sys.argv[1])).cpus), flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, tmp_path, str(len(CPUS))]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == f"{len(CPUS)}\n"
        assert reserve_cores(1, tmp_path) is None
        other.kill()
    freed = reserve_cores(1, tmp_path)
    assert freed
    freed.release()


def test_without_a_lock_folder_nothing_is_reserved(tmp_path):
    (tmp_path / "file").touch()
    assert reserve_cores(1, Path(tmp_path / "file" / "cores")) is None
