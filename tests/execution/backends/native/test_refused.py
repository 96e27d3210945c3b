"""If the system refuses resources to the kernels, missing threads raise an error, and missing memory ends the
process with a message."""

import signal
import subprocess
import sys

import pytest

from streamserve.execution.backends.native.library import kernels

LIMITED = """
import ctypes, resource
import psutil, torch
from streamserve.execution.backends.native.library import ThreadPool, kernels
from streamserve.execution.backends.native.linear import NativeLinear

library, process = kernels(), psutil.Process()
linear = NativeLinear(ThreadPool(library, 2), torch.eye(64))
limit = process.memory_info().vms + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""
"""A program limited to 64 MiB of additional address space: enough for a few threads."""

THREADS = """
before = process.num_threads()
try:
    ThreadPool(library, 500)
except OSError as error:
    print(error.strerror)
assert process.num_threads() == before
x = torch.arange(64.0)[None]
assert torch.equal(linear(x), x)
ThreadPool(library, 2)
"""

MEMORY = """
pool = ThreadPool(library, 2)
library.ss_linear(pool.handle, ctypes.byref(linear.struct), None, 64, 1 << 24, None, 0, 1.0, 0.0)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    if kernels() is None:
        pytest.skip("there is no compiler")
    command = [sys.executable, "-c", LIMITED + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_too_many_threads_are_an_error_and_leave_none() -> None:
    done = run(THREADS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the system refuses 500 threads for the kernels: ")


def test_without_memory_the_process_ends_with_a_message() -> None:
    done = run(MEMORY)
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.startswith("streamserve's kernels: the system refuses 5368709120 bytes of memory")
