"""Shells complete commands, flags, and values of flags with a fixed set of values."""

import os
import subprocess
import sys

import pytest


def run(environment: dict[str, str]) -> str:
    """Return what the command prints for a shell."""
    command = [sys.executable, "-c", "from streamserve.cli.main import app; app(prog_name='streamserve')"]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout


def complete(line: str) -> list[str]:
    """Return the words that bash is offered for the last word of a command line."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    return run({"_STREAMSERVE_COMPLETE": "complete_bash", **words}).split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("streamserve ser", ["serve"]),
        ("streamserve serve --kernel", ["--kernel-path"]),
        ("streamserve serve --kernel-path avx512", ["avx512", "avx512_bf16"]),
        ("streamserve serve --eviction s", ["swap"]),
        ("streamserve bench serve --endpoint c", ["chat", "completions"]),
    ],
)
def test_a_word_is_completed(line: str, offered: list[str]) -> None:
    assert complete(line) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(shell: str) -> None:
    assert "_STREAMSERVE_COMPLETE" in run({"_STREAMSERVE_COMPLETE": f"source_{shell}"})
