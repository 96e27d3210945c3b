"""The pool has the requested size, or a share of the usable memory, and is never larger than that."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from streamserve.execution.compute.memory import KV_FRACTION, after_weights, is_out_of_memory, size_pool
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.system.available_memory import MB, available_bytes, check_processes

BLOCK = 1000
"""Number of bytes in a KV block."""


def config(**fields) -> ModelConfig:
    return ModelConfig(**{"path": "somewhere", "block_size": 16, "max_num_seqs": 4, **fields})


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


@pytest.mark.parametrize(
    ("fields", "available", "expected"),
    [
        # the requested number of blocks, whatever the memory would allow
        ({"num_blocks": 64}, 10**9, (64, 1024)),
        ({"num_blocks": 100}, 10**9, (100, 1024)),
        ({"num_blocks": 10}, 10**9, (10, 160)),
        ({"num_blocks": 70, "kv_cache_bytes": 5 * BLOCK}, 10**9, (70, 1024)),
        # the number of blocks that the bytes hold
        ({"kv_cache_bytes": 70 * BLOCK + 999}, 10**9, (70, 1024)),
        # a full context for every sequence, within a share of the free memory
        ({}, 10**9, (4 * 64, 1024)),
        ({"max_model_len": 100}, 10**9, (4 * 7, 100)),
        ({}, int(100 * BLOCK / KV_FRACTION) + 1, (100, 1024)),
        ({}, int(20 * BLOCK / KV_FRACTION) + 1, (20, 320)),
        # A requested context length is provided, even if it takes more than that share.
        ({"max_model_len": 1024}, 65 * BLOCK, (64, 1024)),
    ],
    ids=str,
)
def test_the_pool_is_sized_by_settings_and_free_memory(fields, available, expected):
    assert size_pool(config(**fields), BLOCK, 1024, available) == expected


@pytest.mark.parametrize(
    ("fields", "available", "named"),
    [
        (
            {"num_blocks": 8},
            10**9,
            [
                "128 tokens",
                "model's 1024",
                "--num-blocks 8 makes",
                "give --num-blocks 64, or set --max-model-len",
            ],
        ),
        (
            {"kv_cache_bytes": 8 * BLOCK},
            10**9,
            ["128 tokens", "model's 1024", "--kv-cache-bytes 8000 makes", "give --kv-cache-bytes 64000, or"],
        ),
        (
            {},
            int(20 * BLOCK / KV_FRACTION) + 1,
            ["320 tokens", "model's 1024", "40% of the free memory makes", "give --kv-cache-bytes 64000, or"],
        ),
        ({"num_blocks": 64}, 10**9, []),
        ({"num_blocks": 7, "max_model_len": 100}, 10**9, []),
    ],
    ids=str,
)
def test_a_pool_below_the_models_context_says_so(fields, available, named, caplog):
    size_pool(config(**fields), BLOCK, 1024, available)
    assert len(caplog.records) == bool(named)
    for text in named:
        assert text in caplog.text


@pytest.mark.parametrize(
    ("fields", "available", "flags"),
    [
        ({"max_model_len": 1025}, 10**9, ["--max-model-len 1025", "1024 positions"]),
        ({"num_blocks": 0}, 10**9, ["--num-blocks 0"]),
        ({"num_blocks": 2000}, 1999 * BLOCK, ["--num-blocks 2000"]),
        ({"num_blocks": 63, "max_model_len": 1024}, 10**9, ["--max-model-len 1024", "--num-blocks 63"]),
        ({"kv_cache_bytes": BLOCK - 1}, 10**9, [f"--kv-cache-bytes {BLOCK - 1}"]),
        (
            {"kv_cache_bytes": 9 * BLOCK, "max_model_len": 150},
            10**9,
            ["--max-model-len 150", "--kv-cache-bytes"],
        ),
        ({"max_model_len": 1024}, 63 * BLOCK, ["--max-model-len 1024"]),
        ({}, BLOCK, ["free memory"]),
    ],
    ids=str,
)
def test_a_pool_that_cannot_be_names_the_flag_to_change(fields, available, flags):
    with pytest.raises(CheckpointError) as error:
        size_pool(config(**fields), BLOCK, 1024, available)
    for flag in flags:
        assert flag in str(error.value)


def test_weights_beyond_the_free_memory_are_refused():
    assert after_weights(2000, 2000) == 0
    with pytest.raises(CheckpointError, match="weights need"):
        after_weights(2000, 1999)


def test_free_memory_is_less_than_the_machine_has():
    assert 0 < available_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


LIMITED = """
import resource, sys
from streamserve.system.available_memory import MB, available_bytes, check_processes
before = available_bytes()
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
print(before, available_bytes())
"""


def test_a_limit_of_addresses_is_a_limit_of_memory():
    limit = 1 << 30
    command = [sys.executable, "-c", LIMITED, str(limit)]
    before, after = map(int, subprocess.run(command, capture_output=True, check=True).stdout.split())
    assert 0 < after < limit
    assert after < before


@pytest.mark.parametrize(
    ("workers", "forked", "free", "addresses", "refusal"),
    [
        (1, True, 170, None, ""),
        (
            1,
            True,
            169,
            None,
            "169 MB of memory are free, and the processes of a server with 1 worker need 170",
        ),
        (5, True, 209, None, "with 5 workers need 210 MB besides its model and KV cache: raise the limit"),
        (5, False, 569, None, "with 5 workers need 570 MB"),
        (5, False, 570, 1000, ""),
        (1, True, 500, 999, "ulimit -v allows 999 MB of addresses, and a worker's libraries need 1000 MB"),
    ],
)
def test_too_little_memory_for_the_processes_is_refused(workers, forked, free, addresses, refusal):
    limit = None if addresses is None else addresses * MB
    if not refusal:
        return check_processes(workers, forked, free * MB, limit)
    with pytest.raises(CheckpointError, match=refusal):
        check_processes(workers, forked, free * MB, limit)


def test_failed_allocations_are_recognised():
    for size in (1 << 60, 1 << 47):
        with pytest.raises(RuntimeError) as error:
            torch.empty(size, dtype=torch.uint8)
        assert is_out_of_memory(error.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(OSError(errno.ENOMEM, "no memory"))
    assert not is_out_of_memory(OSError(errno.ENOENT, "no file"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))


MACHINE = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:   800 kB\n"}
INSIDE = MACHINE | {"proc/self/cgroup": "0::/outer/inner\n"}
VERSION_1 = MACHINE | {"proc/self/cgroup": "5:devices:/other\n4:memory,hugetlb:/outer/inner\n"}


def version_1(group: str, limit: int, usage: int) -> dict[str, str]:
    folder = f"groups/memory/{group}"
    return {f"{folder}/memory.limit_in_bytes": f"{limit}\n", f"{folder}/memory.usage_in_bytes": f"{usage}\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MACHINE, 800 * 1024),
        (
            INSIDE | {"groups/outer/inner/memory.max": "max", "groups/outer/inner/memory.current": "5"},
            800 * 1024,
        ),
        (INSIDE | {"groups/outer/inner/memory.max": "1000", "groups/outer/inner/memory.current": "400"}, 600),
        (INSIDE | {"groups/outer/memory.max": "1000", "groups/outer/memory.current": "300"}, 700),
        (INSIDE | {"groups/memory.max": "1000", "groups/memory.current": "1001"}, 0),
        (
            INSIDE
            | {
                "groups/memory.max": "1000",
                "groups/memory.current": "900",
                "groups/memory.stat": "anon 5\ninactive_file 250\n",
            },
            350,
        ),
        (
            INSIDE
            | {
                "groups/outer/inner/memory.max": "1000",
                "groups/outer/inner/memory.high": "800",
                "groups/outer/inner/memory.current": "300",
            },
            500,
        ),
        (
            INSIDE
            | {
                "groups/outer/memory.max": "1000",
                "groups/outer/memory.high": "max",
                "groups/outer/memory.current": "300",
            },
            700,
        ),
        (
            MACHINE
            | {
                "groups/memory/memory.limit_in_bytes": "1000",
                "groups/memory/memory.usage_in_bytes": "1",
                "proc/self/cgroup": "4:memory:/\n",
            },
            999,
        ),
        (VERSION_1 | version_1("outer/inner", 1000, 400), 600),
        (VERSION_1 | version_1("outer/inner", 2**62, 400) | version_1("outer", 900, 800), 100),
        (
            VERSION_1
            | version_1("outer/inner", 1000, 900)
            | {"groups/memory/outer/inner/memory.stat": "inactive_file 1\ntotal_inactive_file 250\n"},
            350,
        ),
    ],
    ids=[
        "machine", "no limit", "own group", "group above", "over the limit", "cached files",
        "slowed down above", "never slowed down", "version 1",
        "version 1: own group", "version 1: group above", "version 1: cached files",
    ],
)  # fmt: skip
def test_free_memory_is_the_machines_or_what_control_groups_leave(tmp_path, files, expected):
    write(tmp_path, files)
    assert available_bytes(tmp_path / "proc", tmp_path / "groups") == expected


def test_without_a_proc_file_system_half_of_the_machine_is_counted_on(tmp_path):
    built_in = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available_bytes(tmp_path, tmp_path) == built_in // 2
