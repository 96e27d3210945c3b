"""A flag that a command does not have is refused by name, and only a near misspelling is suggested."""

import pytest
from typer.testing import CliRunner

from streamserve.cli.arguments import Arguments, separate
from streamserve.cli.main import app
from streamserve.settings.near_names import edits, near_name
from streamserve.settings.options import SettingsError

DECLARED = {"--port": True, "--prefill": True, "--help": False, "--max-num-seqs": True, "-tp": True}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--prot", "--port"),
        ("--prefil", "--prefill"),
        ("--max-num-sqs", "--max-num-seqs"),
        ("--max-num-seq", "--max-num-seqs"),
    ],
)
def test_a_misspelling_is_recognized(typed: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=f"there is no flag {typed}: did you mean {meant}\\?"):
        separate([typed, "1"], DECLARED, "streamserve serve")


@pytest.mark.parametrize("typed", ["--hf-repo", "--parallel", "--ported", "--x", "--max-requests"])
def test_another_word_gets_no_suggestion(typed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        separate([typed], DECLARED, "streamserve serve")
    assert str(caught.value) == f"there is no flag {typed}: `streamserve serve --help` shows the flags"


@pytest.mark.parametrize(
    "arguments",
    [
        ["model", "--port", "1", "-"],
        ["--port", "--unknown"],  # the value of --port
        ["--port=1", "-tp", "--unknown"],
        ["--help", "--", "--unknown"],
        ["-x"],  # left to the parser
    ],
)
def test_arguments_that_the_command_has_are_left_as_they_are(arguments: list[str]) -> None:
    assert separate(arguments, DECLARED, "streamserve") == Arguments(arguments)


def test_a_flag_may_be_typed_with_underscores() -> None:
    arguments = separate(["--max_num_seqs=3", "--port", "max_num"], DECLARED, "streamserve")
    assert arguments.own == ["--max-num-seqs=3", "--port", "max_num"]


SETTINGS = {**DECLARED, "--speculation-policy": True}
"""Flags of a command that has settings: such a command takes flags of other programs."""


@pytest.mark.parametrize(
    ("arguments", "foreign"),
    [
        (["--ctx-size", "4096"], {"--ctx-size": "4096"}),
        (["-c", "4096"], {"-c": "4096"}),
        (["--ctx_size=4096"], {"--ctx-size": "4096"}),
        (["--hf-repo", "-x"], {"--hf-repo": "-x"}),
        (["--jinja"], {"--jinja": True}),
        (["--no-jinja"], {"--jinja": False}),
        (["-fa", "on"], {"-fa": "on"}),
        (["-fa"], {"-fa": True}),
        (["--lora-modules", "a=/a", "b=/b"], {"--lora-modules": ["a=/a", "b=/b"]}),
        (["--lora-modules", "a=/a", "--lora-modules=b=/b"], {"--lora-modules": ["a=/a", "b=/b"]}),
        (["--lora-modules", "a=/a", "--lora-modules", "b=/b"], {"--lora-modules": ["a=/a", "b=/b"]}),
    ],
)
def test_flags_of_other_programs_are_taken_with_their_values(
    arguments: list[str], foreign: dict[str, object]
) -> None:
    separated = separate(["MODEL", *arguments, "--port", "1"], SETTINGS, "streamserve serve")
    assert separated == Arguments(["MODEL", "--port", "1"], foreign)
    if arguments[0].startswith("--"):
        with pytest.raises(SettingsError, match="there is no flag"):
            separate(arguments, DECLARED, "streamserve doctor")


def test_what_follows_the_values_of_a_flag_is_left() -> None:
    separated = separate(["--lora-modules", "a=/a", "MODEL", "-fa", "PROMPT"], SETTINGS, "streamserve chat")
    assert separated.own == ["MODEL", "PROMPT"]


@pytest.mark.parametrize("flag", ["--ctx-size", "--lora-modules"])
def test_a_missing_value_is_named(flag: str) -> None:
    with pytest.raises(SettingsError, match=f"{flag}: it needs a value"):
        separate([flag], SETTINGS, "streamserve serve")


@pytest.mark.parametrize(
    ("one", "other", "count"), [("port", "prot", 1), ("port", "por", 1), ("port", "part", 1), ("a", "b", 1)]
)
def test_edits(one: str, other: str, count: int) -> None:
    assert edits(one, other, 3) == edits(other, one, 3) == count
    assert edits(one, one, 3) == 0


def test_many_letters_are_compared_with_no_name() -> None:
    assert near_name("x" * 100_000, ["port"]) is None


@pytest.mark.parametrize("command", [["keys", "new"], ["models", "pull"], ["bench", "serve"]])
def test_every_command_refuses_in_one_line(command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--hf-repo", "x"])
    assert done.exit_code == 2
    assert done.output.splitlines() == [
        f"streamserve: there is no flag --hf-repo: `root {' '.join(command)} --help` shows the flags"
    ]
