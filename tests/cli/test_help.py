"""`--help` in a terminal of 80 columns shows every flag with its whole name, in a group."""

import re

import pytest
from typer.testing import CliRunner

from streamserve.cli.help import COMMON, FIRST, grouped, setting_groups
from streamserve.cli.main import app
from streamserve.settings.options import Option, options

WIDTH = 80


def run(*arguments: str) -> str:
    """Return the output of a command."""
    environment = {"COLUMNS": str(WIDTH), "TERMINAL_WIDTH": str(WIDTH)}
    result = CliRunner().invoke(app, list(arguments), env=environment)
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize(
    "command",
    [["serve"], ["generate"], ["chat"], ["batch"], ["profile"], ["draft"], ["bench", "serve"], ["doctor"]],
)
def test_no_line_is_longer_than_the_terminal_and_no_flag_is_cut(command: list[str]) -> None:
    text = run(*command, "--help")
    if "--help-all" in text:
        text += run(*command, "--help-all")
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert len([line for line in lines if re.match(r"  --[a-z]", line)]) > 1
    assert "…" not in text


def test_every_setting_is_in_the_section_of_its_group() -> None:
    text = run("serve", "--help-all")
    for title, settings in setting_groups().items():
        section = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        for option in settings:
            name = option.name.replace("_", "-")
            value = rf"/ --no-{name}\b" if option.kind is bool else r"[<\[A-Z]"  # <text>, TEXT, [one|other]
            assert re.search(rf" --{name} {value}", section), name  # also after a short name


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "batch", "profile"])
def test_the_help_is_short_and_says_where_the_rest_is(command: str) -> None:
    text, whole = run(command, "--help"), run(command, "--help-all")
    shown, every = (set(re.findall(r"^  --([a-z-]+)", page, re.MULTILINE)) for page in (text, whole))
    assert len(text.splitlines()) < 140
    assert shown < every
    assert f"`root {command} --help-all` shows {len(every - shown)} further flags." in " ".join(text.split())


def test_common_settings_are_settings() -> None:
    assert {option.name for option in options()} > COMMON


def test_groups_hold_all_settings_once_in_their_order() -> None:
    names = [option.name for group in setting_groups().values() for option in group]
    assert names == [option.name for option in options()]
    assert list(setting_groups()) == list(FIRST.values())


def test_a_setting_that_begins_no_group_is_in_that_of_the_one_before() -> None:
    settings = [Option(name, str, None, "") for name in ("a", "b", "c")]
    groups = grouped(settings, {"b": "Second"})
    assert {title: [option.name for option in group] for title, group in groups.items()} == {
        "Settings": ["a"],
        "Second": ["b", "c"],
    }


@pytest.mark.parametrize("group", [[], ["models"], ["keys"], ["bench"]])
def test_the_list_of_commands_has_whole_sentences(group: list[str]) -> None:
    section = run(*group, "--help").partition("\nCommands:\n")[2]
    lines = [line for line in section.splitlines() if line]
    assert lines
    assert all(line.endswith(".") and not line.endswith("...") for line in lines), lines
