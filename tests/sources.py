"""Syntax trees of Python's sources."""

import ast
from pathlib import Path


def parse(source: str | Path) -> ast.Module:
    """Return the tree of a text, or of the text in a file. Python 3.11 raises SystemError if another tree is
    built at the same time (python/cpython#106905): so the tree is built again then."""
    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    for _ in range(3):
        try:
            return ast.parse(text)
        except SystemError:
            continue
    return ast.parse(text)
