"""A worker reads its configuration from standard input, and rejects anything else."""

import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-P", "-m", "streamserve.workers"]


@pytest.mark.parametrize("data", [b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1"])
def test_without_a_configuration_it_ends_with_an_error(data: bytes) -> None:
    done = subprocess.run(COMMAND, input=data, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert b"Error" in done.stderr


@pytest.mark.parametrize("data", [b"", b"\x10\x00", b"\x10\x00\x00\x00", b"\x10\x00\x00\x00\x80"])
def test_an_incomplete_configuration_is_one_line(data: bytes) -> None:
    """If the parent has ended, too, the worker prints nothing: tests/test_cleanup.py holds that."""
    done = subprocess.run(COMMAND, input=data, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"standard input ended before the worker's configuration was complete\n"
