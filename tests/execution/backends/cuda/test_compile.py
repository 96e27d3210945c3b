"""Every kernel compiles for every supported GPU, on a machine without a GPU: no register is spilled, and
shared memory fits."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.conftest import Scale
from tests.gpu.compile import CAPABILITIES, SHARED_BYTES, Compiled
from tests.gpu.examples import all_examples


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_fit_the_device(capability: int, scale: Scale) -> None:
    if not scale.full and capability != CAPABILITIES[0]:
        pytest.skip("with --full")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "tests.gpu.compile",
        "--capability",
        str(capability),
    ]
    done = subprocess.run(
        command, env=environment | {"COLUMNS": "200"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if f"│ {capability:>2} │" in line]
    names = {example.name for example in all_examples(capability)}
    assert {row.split("│")[1].strip() for row in rows} == names
    assert len(names) > 15


def test_programs_that_do_not_fit_and_unaligned_copies_are_faults() -> None:
    """Programs that do not fit and unaligned copies are reported. (Triton 3.6 copied 16 bytes at once from
    vectors of 132 bytes.)"""
    example = next(e for e in all_examples(90) if e.name == "attend tile 16, 8 bits")
    kernel = Compiled("k", 90, warps=4, registers=160, spills=0, shared=22016, tensor_cores=True, copied=4)
    assert kernel.programs == example.programs == 3
    assert kernel.fault(example) is None
    assert "aligned to 4" in str(replace(kernel, copied=16).fault(example))
    assert "2 programs fit" in str(replace(kernel, registers=200).fault(example))
    assert "spills 8" in str(replace(kernel, spills=8).fault(example))


def test_occupancy_is_bounded_by_warps_registers_and_shared_memory() -> None:
    kernel = Compiled("k", 90, warps=4, registers=32, spills=0, shared=0, tensor_cores=False)
    assert kernel.occupancy == 1.0
    assert replace(kernel, registers=128).occupancy == 4 * 4 / 64  # 65,536 / (128 · 128) blocks
    assert replace(kernel, shared=SHARED_BYTES[90] // 2).occupancy == 2 * 4 / 64
    assert replace(kernel, warps=32, registers=64).occupancy == 0.5  # one block of 1,024 threads
