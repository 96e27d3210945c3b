"""The commands in the README work as typed in a fresh clone, and their flags exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer

from scripts import readme
from streamserve.cli.main import app
from tests.docs.pages import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"^    (?:\$ )?((?:streamserve [a-z]|python )[^\n]*)$", re.MULTILINE)
COMMANDS = COMMAND.findall(README)


def test_the_environment_is_activated_before_its_commands() -> None:
    first = COMMAND.search(README)
    assert first is not None
    assert 0 < README.find("source .venv/bin/activate") < first.start()


@pytest.mark.parametrize("command", [text for text in COMMANDS if text.startswith("streamserve ")])
def test_flags_exist(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    parsed = typer.main.get_command(app)
    named = parsed.commands[words[0]]  # type: ignore[attr-defined]
    known = {flag for parameter in named.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("command", [text for text in COMMANDS if text.startswith("python ")])
def test_examples_exist(command: str) -> None:
    assert (ROOT / Path(shlex.split(command)[1])).is_file()


def test_it_is_read_in_a_minute() -> None:
    assert README.partition("## Documentation")[0].count("\n") <= 100


@pytest.mark.parametrize(("language", "endings"), [("Python", ["py"]), ("C++", ["cpp", "h"])])
def test_the_size_is_true_to_within_a_twentieth(language: str, endings: list[str]) -> None:
    stated = re.search(rf"([\d,]+) (?:lines )?of {re.escape(language)}", README)
    assert stated is not None
    files = [file for ending in endings for file in (ROOT / "src").rglob(f"*.{ending}")]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert abs(int(stated[1].replace(",", "")) - lines) <= lines / 20


STARTS = r"(?:make|pip|source|python|curl|git|streamserve)(?: [a-z-][^`\n]*)?"
INDENTED = re.compile(rf"^ {{4}}(?:\$ )?({STARTS})$", re.MULTILINE)
SPANS = re.compile(rf"`({STARTS})`")


def test_every_command_is_run_by_the_script() -> None:
    run = [command.text for command in readme.commands(README)]
    typed = [*INDENTED.findall(README), *SPANS.findall(README)]
    shown = [command.shown for command in readme.commands(README)]
    left = [text for text in typed if text not in run and not any(text in output for output in shown)]
    assert sorted(set(left)) == sorted(readme.NOT_RUN)
    assert {"source .venv/bin/activate", "make serve", "make wheel", "make docs", "make test"} <= {
        text.partition("  ")[0] for text in run
    }
    assert "python -" in run, "the README has no block of Python"


@pytest.mark.parametrize(
    ("shown", "printed", "loose", "piece"),
    [
        ("a 1\nb …\nc", "a 1\nb 2\nc\n", False, ""),
        ("a 1\nb", "b\na 1\n", False, "b"),
        ("in 3.3 s", "in 12 s", False, "in 3.3 s"),
        ("in 3.3 s", "in 12 s", True, ""),
        ("in 3.3 s", "in a s", True, "in 3.3 s"),
    ],
)
def test_what_the_page_shows_must_be_printed_in_order(
    shown: str, printed: str, loose: bool, piece: str
) -> None:
    assert readme.missing(shown, printed, loose) == piece


def test_commands_run_with_the_files_as_they_are(tmp_path: Path) -> None:
    root, clone = tmp_path / "root", tmp_path / "clone"
    root.mkdir()
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "files")):
        for name in ("same", "changed", "deleted"):
            (root / name).write_bytes(b"before\0")
        subprocess.run([*git, *command], cwd=root, check=True)
    (root / "changed").write_bytes(b"after\0")
    (root / "deleted").unlink()
    (root / "folder").mkdir()
    (root / "folder" / "new").write_text("new")
    readme.clone_of(root, clone)
    found = {
        file.relative_to(clone).as_posix(): file.read_bytes() for file in clone.rglob("*") if file.is_file()
    }
    assert {name: data for name, data in found.items() if not name.startswith(".git/")} == {
        "same": b"before\0",
        "changed": b"after\0",
        "folder/new": b"new",
    }
