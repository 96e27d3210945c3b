"""A worker process has the right threads, CPUs, libraries and memory."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from streamserve import LLM, SamplingParams
from streamserve.execution.backends.native.library import kernels
from tests.processes import WORKER, words

MIB = 1 << 20


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("embedded", threads=2, num_blocks=256, max_model_len=512, profile=False) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        llm.generate([[number + 5] * 40 for number in range(8)], greedy, use_tqdm=False)
        yield llm


@pytest.fixture(scope="module")
def folder(llm) -> Path:
    return Path("/proc") / str(llm._llm.process_id())


def test_there_is_at_most_one_openmp_runtime(folder):
    maps = (folder / "maps").read_text()
    runtimes = set(re.findall(r"/\S*lib(?:gomp|iomp5?|omp)\b\S*", maps))
    assert "libtorch" in maps
    assert len(runtimes) <= 1, runtimes


def test_lists_of_processes_show_its_role_and_index(folder):
    assert words(psutil.Process(int(folder.name)))[-2:] == [WORKER, "unified-0/1"]
    assert (folder / "comm").read_text() == "unified-0/1\n"


def test_kernel_threads_are_pinned_to_separate_cpus(folder):
    if kernels() is None or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("threads are not pinned without kernels, or with a single processor")
    allowed = [_cpus(task / "status") for task in (folder / "task").iterdir()]
    pinned = [next(iter(one)) for one in allowed if len(one) == 1]
    assert len(set(pinned)) in (0, 2)  # There are none if other workers have taken them.
    main = _cpus(folder / "status")
    others = [number for number in pinned if number not in main]
    assert len(others) == (1 if pinned else 0)


def test_private_memory_is_weights_cache_and_little_else(llm, folder, record):
    match = re.search(r"RssAnon:\s+(\d+) kB", (folder / "status").read_text())
    assert match
    anonymous, ready = int(match[1]) * 1024, llm._llm.ready
    limit = 1.15 * ready.model.weight_bytes + ready.kv_cache_bytes + 400 * MIB
    record(anonymous_mib=anonymous // MIB, limit_mib=int(limit) // MIB)
    assert anonymous <= limit


def _cpus(status: Path) -> set[int]:
    match = re.search(r"Cpus_allowed_list:\s+(\S+)", status.read_text(encoding="utf-8"))
    assert match
    processors: set[int] = set()
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        processors |= set(range(int(first), int(last or first) + 1))
    return processors
