"""Code that design pages name exists, in the form `package/module.py` with `:name` or `:Class.method`."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.sources import parse

SOURCE = ROOT / "src" / "streamserve"
FOLDERS = (SOURCE, ROOT)
DESIGN = sorted((DOCS / "design").rglob("*.md"))
REFERENCE = re.compile(r"\b((?:[a-z_]+/)+[a-z_0-9]+\.py)(?::([A-Za-z_][\w.]*\w))?")


@cache
def defined(module: Path) -> frozenset[str]:
    """Return the top-level names of a module, and the methods and fields of its classes."""
    names = set()
    for node in parse(module).body:
        for name in _names(node):
            names.add(name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for inner in node.body for name in _names(inner)}
    return frozenset(names)


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def absent(text: str) -> list[str]:
    """Return the references in a text that refer to nothing."""
    wrong = []
    for path, name in REFERENCE.findall(text):
        module = next((folder / path for folder in FOLDERS if (folder / path).is_file()), None)
        if module is None or (name and name not in defined(module)):
            wrong.append(f"{path}:{name}" if name else path)
    return wrong


def without_diffs(page: Path) -> str:
    """Return the page without its diffs, which name code that does not exist yet."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", DESIGN, ids=lambda page: str(page.relative_to(DOCS)))
def test_what_the_page_names_exists(page: Path) -> None:
    assert absent(without_diffs(page)) == []


def test_wrong_references_are_found() -> None:
    text = "`engine/engine.py:Engine.step`, `engine/engine.py:Engine.absent`, `engine/absent.py`"
    assert absent(text) == ["engine/engine.py:Engine.absent", "engine/absent.py"]


def test_the_pages_name_much() -> None:
    assert sum(len(REFERENCE.findall(page.read_text(encoding="utf-8"))) for page in DESIGN) > 100
