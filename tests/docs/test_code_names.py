"""Files, functions and fields that docstrings and comments name exist.

The test checks each path or file name, a name in backticks, a name followed by `()`. A name exists if code
has each of its words; a docstring of src/ names code of src/. A member of a class, such as `Engine.step`, is
a word of a file that defines the class.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

CHECKED = ("src/streamserve/", "tests/", "benchmarks/", "examples/")
CODE = {".py", ".cpp", ".h", ".js", ".html", ".css"}
SETTINGS = {".toml", ".yml", ".yaml"}
DATA = ("src/streamserve/embedded/", "tests/api/recorded/")
"""Folders of texts that are not code."""

FOREIGN = {
    "llama.cpp": "a project",
    "v1/metrics/loggers.py": "vLLM's",
    "v1/spec_decode/metrics.py": "vLLM's",
    "chat_completion/protocol.py": "vLLM's",
    "completion/protocol.py": "vLLM's",
    "responses/protocol.py": "vLLM's",
    "quant_config.py": "of compressed-tensors",
    "package/module.py": "a pattern",
    "model.layers.LAYER.LINEAR": "a pattern",
    "_post_": "a part of names",
}
"""Names that do not exist in this repository, and the project that each belongs to."""

TRIPLE_QUOTED = re.compile(r'(^[ \t]*)?[rbf]*"""(.*?)"""', re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(?:^|\s)(?:#|//) (.*)$", re.MULTILINE)
WORD = re.compile(r"[A-Za-z_]\w*")
CLASS = re.compile(r"^\s*(?:class|struct) (\w+)", re.MULTILINE)
IN_BACKTICKS = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`\n]*\))?`")
CALLED = re.compile(r"(?<![\w.`])([A-Za-z_]\w*(?:\.\w+)*)\(\)")
PATH = re.compile(
    r"(?<![\w:/.-])(?:\w[\w-]*/)*[\w-]+\.(?:py|cpp|h|md)\b"
    r"|(?<![\w:/.-])(?:src|tests|docs|benchmarks|scripts|examples|deploy)/[\w/-]*\w(?:\.\w+)*"
)


@dataclass(frozen=True)
class Source:
    """A file's prose (docstrings and comments), and the words of the rest."""

    prose: str
    words: frozenset[str]
    classes: frozenset[str]


def source(text: str) -> Source:
    """Split a file's text. A string that begins a line is a docstring, unless it is an argument."""
    prose: list[str] = []

    def take(match: re.Match[str]) -> str:
        before = text[max(0, match.start() - 100) : match.start()].rstrip()
        if match[1] is None or before.endswith(("(", "[", ",", "=")):
            return match[0]
        prose.append(match[2])
        return ""

    code = TRIPLE_QUOTED.sub(take, text)
    prose += COMMENT.findall(code)
    code = COMMENT.sub("", code)
    return Source("\n".join(prose), frozenset(WORD.findall(code)), frozenset(CLASS.findall(code)))


@dataclass(frozen=True)
class Repository:
    """The files and words that names can refer to: files also by the ends of their paths, and the words of
    code."""

    files: Mapping[str, Source]
    ends: frozenset[str]
    words: frozenset[str]
    product_words: frozenset[str]
    class_words: Mapping[str, frozenset[str]]

    def absent(self, name: str, prose: str) -> list[str]:
        """Return the names in the prose of a file that refer to nothing."""
        words = self.product_words if name.startswith("src/") else self.words
        named = {*IN_BACKTICKS.findall(prose), *CALLED.findall(prose)}
        paths = set(PATH.findall(prose))
        return sorted(
            {each for each in named - self.ends if not self._known(each, words)} | (paths - self.ends)
        )

    def _known(self, name: str, words: frozenset[str]) -> bool:
        parts = name.split(".")
        members = (self.class_words.get(owner, words) for owner in parts)
        return words.issuperset(parts) and all(
            part in of_owner for part, of_owner in zip(parts[1:], members, strict=False)
        )


@cache
def repository() -> Repository:
    """Return this repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    tracked = [name for name in listed if (ROOT / name).is_file()]
    code = [name for name in tracked if Path(name).suffix in CODE and not name.startswith(DATA)]
    files = {name: source((ROOT / name).read_text(encoding="utf-8")) for name in code}
    texts = [
        (ROOT / name).read_text(encoding="utf-8")
        for name in tracked
        if Path(name).suffix in SETTINGS or "Makefile" in name
    ]
    settings = frozenset(WORD.findall("\n".join(texts)))
    return Repository(
        files,
        frozenset(end for name in tracked for end in _ends(name)) | FOREIGN.keys(),
        settings.union(*(file.words for file in files.values())),
        settings.union(*(file.words for name, file in files.items() if name.startswith("src/"))),
        _class_words(files),
    )


def _ends(path: str) -> Iterator[str]:
    """Return the ends of a path, and of the paths of its folders."""
    parts = Path(path).parts
    for last in range(len(parts), 0, -1):
        for first in range(last):
            yield "/".join(parts[first:last])


def _class_words(files: Mapping[str, Source]) -> dict[str, frozenset[str]]:
    words: dict[str, frozenset[str]] = {}
    for file in files.values():
        for name in file.classes:
            words[name] = words.get(name, frozenset()) | file.words
    return words


def test_names_in_docstrings_and_comments_lead_somewhere() -> None:
    known = repository()
    checked = {name: file for name, file in known.files.items() if name.startswith(CHECKED)}
    assert len(checked) > 500
    wrong = [f"{name}: {each}" for name, file in checked.items() for each in known.absent(name, file.prose)]
    assert not wrong, "\n".join(wrong)


def test_docstrings_and_comments_name_much() -> None:
    prose = [file.prose for name, file in repository().files.items() if name.startswith(CHECKED)]
    assert sum(len(IN_BACKTICKS.findall(text)) for text in prose) > 1000
    assert sum(len(PATH.findall(text)) for text in prose) > 50


def test_every_foreign_name_is_named() -> None:
    prose = "\n".join(file.prose for name, file in repository().files.items() if name.startswith(CHECKED))
    assert [name for name in FOREIGN if name not in prose] == []


@pytest.mark.parametrize(
    ("prose", "absent"),
    [
        ("See `engine/engine.py`, engine.py, cpp/pool.h, tests/engine and docs/design.", []),
        ("Combined in test_absent.py, by tests/absent and engine/absent.py.",
         ["engine/absent.py", "test_absent.py", "tests/absent"]),
        ("Refused by `remove_absent`, `Engine.absent_step(plan)` or absent_call().",
         ["Engine.absent_step", "absent_call", "remove_absent"]),
        ("Refused by `Engine.step`, `Scaling.after_removing(names)` or free_names().", []),
        ("`Engine.after_removing` is a method of another class.", ["Engine.after_removing"]),
        ("Sentences of `two words`, `x[1]`, `--flags` and https://host.name/docs/absent name no code.", []),
    ],
)  # fmt: skip
def test_absent_names_are_found(prose: str, absent: list[str]) -> None:
    assert repository().absent("src/streamserve/engine/engine.py", prose) == absent


def test_a_test_is_no_name_for_the_product() -> None:
    prose = "`test_absent_names_are_found`"
    assert repository().absent("tests/conftest.py", prose) == []
    assert repository().absent("src/streamserve/client.py", prose) == ["test_absent_names_are_found"]


def test_strings_are_code_and_docstrings_are_not() -> None:
    text = 'PROGRAM = """\nimport inside\n"""\n\ndef named():\n    """Return `told`."""  # as `said`\n'
    split = source(text + '    run(\n        """x = argument"""\n    )\n')
    assert {"inside", "named", "argument"} <= split.words
    assert not split.words & {"told", "said"}
    assert IN_BACKTICKS.findall(split.prose) == ["told", "said"]
