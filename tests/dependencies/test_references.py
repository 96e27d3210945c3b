"""References are found in the text of a file."""

import pytest

from tests.dependencies.references import references


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("import streamserve.engine.engine", "streamserve.engine.engine"),
        ("from streamserve.engine import engine", "streamserve.engine:engine"),
        ("from .page import render", "benchmarks.figures.page:render"),
        ("from . import page", "benchmarks.figures:page"),
        ("from ..report import write", "benchmarks.report:write"),
        ("def later():\n    from tests.ggufs import write_gguf", "tests.ggufs:write_gguf"),
        ("if TYPE_CHECKING:\n    import tests.serving", "tests.serving"),
        ("Family('tests.campaigns.http')", "tests.campaigns.http"),
        ("patch.setattr('streamserve.hub.models.HUB', 1)", "streamserve.hub.models.HUB"),
        (
            "CODE = 'import sys; from streamserve.engine import engine, status; engine'",
            "streamserve.engine:status",
        ),
        ("CODE = 'import streamserve.fleet.runtime as runtime'", "streamserve.fleet.runtime"),
    ],
)
def test_imports_are_found(text: str, module: str) -> None:
    assert module in references(text, "benchmarks.figures", False).modules


@pytest.mark.parametrize(
    "text",
    [
        "run([sys.executable, '-m', 'streamserve', 'serve'])",
        "start(python, '-m', 'streamserve')",
        "COMMAND = ('-m', 'streamserve')",
        "run([str(BIN / 'streamserve'), 'serve'])",
        "shell('python -m streamserve serve')",
    ],
)
def test_the_command_line_is_found(text: str) -> None:
    assert references(text, "tests", False).programs == ["streamserve"]


def test_the_package_does_not_start_its_command_line_by_naming_it() -> None:
    text = "words = ['streamserve', 'profile']\nrun([sys.executable, '-P', '-m', 'streamserve.workers'])"
    assert references(text, "streamserve.workers", False).programs == ["streamserve.workers"]


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        (
            "BOARD = Path(__file__).parents[2] / 'docs' / 'operations' / 'grafana.json'",
            "docs/operations/grafana.json",
        ),
        ("PEERS = ROOT / 'build' / name / 'venv'", "build venv"),
        ("SHIPPED = ROOT / 'src/streamserve/embedded'", "src/streamserve/embedded"),
        ("read('README.md')", "README.md"),
    ],
)
def test_paths_are_found(text: str, paths: str) -> None:
    assert set(paths.split()) <= set(references(text, "tests", False).paths)


def test_prose_names_nothing() -> None:
    found = references(
        '"""Runs `python -m streamserve` as tests.serving does."""\nx = 1\n"""docs/index.md"""',
        "tests",
        False,
    )
    assert (found.modules, found.programs, found.paths) == ([], [], [])


def test_what_a_package_imports_when_asked_is_for_those_who_ask() -> None:
    text = (
        "from streamserve.version import VERSION\n"
        "if TYPE_CHECKING:\n    from streamserve.llm.llm import LLM as LLM\n"
        "def __getattr__(name):\n    from streamserve.protocol.sampling import Slo\n"
    )
    found = references(text, "streamserve", True)
    assert found.modules == ["streamserve.version:VERSION"]
    assert found.exports == {"LLM": "streamserve.llm.llm:LLM", "Slo": "streamserve.protocol.sampling:Slo"}


def test_computed_imports_are_noticed() -> None:
    assert references("import_module(f'{package}.{name}')", "tests", False).dynamic
    assert not references("importlib.import_module('tests.serving')", "tests", False).dynamic
