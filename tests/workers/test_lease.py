"""A worker's process ends with its lease, which its parent extends through a pipe."""

import subprocess
import sys
import time

from streamserve.protocol.lease import LEASE
from streamserve.workers.__main__ import LEASE_EXIT_STATUS

LEASE_SECONDS = 0.5
PROGRAM = """
import ctypes, os, threading
from streamserve.protocol.lease import Lease
from streamserve.workers.__main__ import exit_with_parent

threading.Thread(target=exit_with_parent, args=(0, lambda: True, None, Lease()), daemon=True).start()
for _ in range(5):
    ctypes.PyDLL(None).usleep(700_000)  # no other thread runs, as while a library is imported
print("alive", flush=True)
threading.Event().wait()  # only the other thread reads the pipe
"""


def run(extended: float) -> tuple[int, str]:
    """Return the exit status and the output of a process whose lease is extended for this number of
    seconds."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    until = time.monotonic() + extended
    try:
        while time.monotonic() < until and process.poll() is None:
            process.stdin.write(LEASE.pack(time.monotonic() + LEASE_SECONDS))
            process.stdin.flush()
            time.sleep(0.15)
        status = process.wait(20)
    finally:
        process.kill()
        process.stdin.close()
    assert process.stdout is not None
    return status, process.stdout.read().decode()


def test_a_lease_that_was_extended_while_no_thread_ran_is_not_over() -> None:
    assert run(extended=5.5) == (LEASE_EXIT_STATUS, "alive\n"), "the process ended after its last extension"


def test_a_lease_that_is_not_extended_ends_the_process() -> None:
    assert run(extended=0.3) == (LEASE_EXIT_STATUS, "")
