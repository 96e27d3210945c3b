"""Commands work in the unusual environments of services, containers and old systems."""

import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_server import PLAIN
from tests.exhaustion.limits import memory_limit


def generate(tmp_path: Path, closed: tuple[int, ...] = (), **environment: str | None) -> tuple[str, str]:
    """Run `generate` with these standard streams `closed`; return its standard output and error."""
    command = [*PLAIN, "generate", "hello", "--max-tokens", "4", "--backend", "reference", "--threads", "1"]
    given = {name: value for name, value in (os.environ | environment).items() if value is not None}
    redirected = " ".join(f"{number}>&-" for number in closed)
    result = subprocess.run(
        ["sh", "-c", f'"$@" {redirected}', "sh", *command],
        capture_output=True, env=given, cwd=tmp_path, timeout=120, check=False, encoding="utf-8",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout, result.stderr


def test_an_answer_in_odd_surroundings_is_the_same(tmp_path: Path) -> None:
    """The answer is the same without UTF-8, without a home folder, with a temporary folder whose path is too
    long for sockets, with a relative cache folder, and without standard input."""
    text, _ = generate(tmp_path)
    long = tmp_path / ("x" * 90)
    long.mkdir()
    odd, errors = generate(
        tmp_path, (0,), HOME=None, TMPDIR=str(long), XDG_CACHE_HOME="relative", LC_ALL="C", PYTHONUTF8="0",
        PYTHONIOENCODING="iso-8859-1",
    )  # fmt: skip
    assert odd == text != ""
    assert os.listdir(tmp_path) == [long.name], errors


def test_without_standard_output_nothing_is_printed_and_nothing_fails(tmp_path: Path) -> None:
    assert generate(tmp_path, (0, 1))[0] == ""
    assert generate(tmp_path, (0, 1, 2)) == ("", "")


def test_a_deleted_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    deleted = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", deleted, "sh", *PLAIN, "version"],
        capture_output=True, cwd=tmp_path, timeout=120, check=False, encoding="utf-8",
    )  # fmt: skip
    reason = "the current folder cannot be read (No such file or directory): change to another one"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"streamserve: {reason}\n")


def refused_start(before: Callable[[], None]) -> str:
    """Return the output of a server that refuses to start, in a process that `before` has limited."""
    result = subprocess.run(
        [*PLAIN, "serve", "embedded", "--port", "0"],
        capture_output=True, preexec_fn=before, timeout=120, check=False, encoding="utf-8",
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


def test_too_few_addresses_are_refused_with_what_is_needed() -> None:
    limit = 700_000_000
    message = refused_start(lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert "ulimit -v allows 700 MB of addresses, and a worker's libraries need 1000 MB" in message


def test_a_small_control_group_is_refused_with_what_is_needed() -> None:
    with memory_limit(150_000_000) as (kind, before):
        if kind == "RLIMIT_AS":
            pytest.skip("no control group can be made")
        message = refused_start(before)
    assert "MB of memory are free, and the processes of a server with 1 worker need 170 MB" in message
