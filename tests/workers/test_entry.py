"""A worker reads its configuration from standard input, and rejects anything else."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "data", [b"", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", b"\x02\x00\x00\x00\x80"]
)
def test_without_a_configuration_it_ends_with_an_error(data: bytes) -> None:
    command = [sys.executable, "-m", "streamserve.workers"]
    done = subprocess.run(command, input=data, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert b"Error" in done.stderr
