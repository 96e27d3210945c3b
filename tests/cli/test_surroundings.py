"""Commands in the surroundings that services, containers and old systems give them."""

import os
import subprocess
from pathlib import Path

from tests.command_server import PLAIN


def generate(tmp_path: Path, closed: tuple[int, ...] = (), **environment: str | None) -> tuple[str, str]:
    """Return what an answer prints on standard output and error, with these streams `closed`."""
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
    """No UTF-8, no home, a folder for temporary files that is too long for sockets, a cache that is not
    absolute, and no standard input."""
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
