"""`streamserve generate` takes the prompt from an argument, a file, or both."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamserve.cli.generate import _text
from streamserve.cli.main import app


def test_a_file_follows_the_prompt(tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text("A ship.\n", encoding="utf-8")
    assert _text("Summarize:", page) == "Summarize:\n\nA ship.\n"
    assert _text(None, page) == "A ship.\n"
    assert _text("Hello", None) == "Hello"
    page.write_bytes(b"one\r\ntwo\rthree\n")
    assert _text(None, page) == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is no prompt: give PROMPT, --file or both"),
        (("--file", "none.txt"), "--file: none.txt cannot be read: No such file or directory"),
        (("--file", "odd.txt"), "--file: odd.txt is not a text in UTF-8"),
    ],
)
def test_a_missing_prompt_is_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd.txt").write_bytes(b"\xff\xfe\xfa")
    done = CliRunner().invoke(app, ["generate", *arguments])
    assert (done.exit_code, done.stderr) == (2, f"streamserve: {message}\n")


def test_max_tokens_is_within_the_context() -> None:
    command = ["generate", "What is 12 + 7?", "--max-tokens", "100000", "--no-profile", "--threads", "1"]
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, done.stdout) == (0, "12 + 7 = 19.\n"), done.output
