"""A service goes on when its output cannot be written, and other commands say what is wrong in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TWICE = """
import logging
from streamserve.cli.announce import announce
logging.basicConfig(format="%(message)s")
announce("loading …")
announce("ready")
"""


def run(*arguments: str, stdout: int | str) -> subprocess.CompletedProcess[str]:
    """Run Python with the standard output `stdout`, a path or a descriptor."""
    target = os.open(stdout, os.O_WRONLY) if isinstance(stdout, str) else stdout
    try:
        return subprocess.run(
            [sys.executable, *arguments], env=os.environ | {"PYTHONUTF8": "1"}, stdout=target,
            stderr=subprocess.PIPE, text=True, check=False, timeout=60,
        )  # fmt: skip
    finally:
        os.close(target)


def test_what_cannot_be_printed_is_logged_once() -> None:
    full = run("-c", TWICE, stdout="/dev/full")
    assert (full.returncode, full.stderr) == (
        0, "standard output cannot be written (No space left on device): nothing more is printed\n"
    )  # fmt: skip
    reader, writer = os.pipe()
    os.close(reader)
    gone = run("-c", TWICE, stdout=writer)
    assert (gone.returncode, gone.stderr.count("\n"), "Broken pipe" in gone.stderr) == (0, 1, True)


def test_what_can_be_printed_is_printed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.touch()
    assert run("-c", TWICE, stdout=str(out)).stderr == ""
    assert out.read_text(encoding="utf-8") == "loading …\nready\n"


@pytest.mark.parametrize("arguments", [("version",), ("--help",), ("serve", "--print-config")], ids=str)
def test_a_command_whose_output_cannot_be_written_fails_in_one_line(arguments: tuple[str, ...]) -> None:
    done = run("-m", "streamserve", *arguments, stdout="/dev/full")
    assert (done.returncode, done.stderr) == (1, "streamserve: [Errno 28] No space left on device\n")
