"""Render one Markdown page: its marked tables and numbers."""

import re
from pathlib import Path

from .files import ROOT
from .lookup import value
from .tables import TABLES

TABLE = re.compile(r"(<!-- figures: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"<!--=([\w.-]+)-->(.*?)<!--/-->", re.DOTALL)
NUMBERS = re.compile(r"<!-- numbers\n(.*?)-->", re.DOTALL)


class PageError(Exception):
    """A page's marker or definition is wrong."""


def pages() -> list[Path]:
    """Return the pages that may have markers."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def render(page: Path) -> str:
    """Return the page with every marked table and number filled in from the result files.

    Raises:
        PageError: a marker has no definition, a definition no marker, or one of them cannot be read.
    """
    text = page.read_text(encoding="utf-8")
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)
    defined = _definitions(text)
    used = set(re.findall(r"<!--=([\w.-]+)-->", text))
    if used != set(defined):
        raise PageError(f"{page.name}: used or defined alone: {', '.join(sorted(used ^ set(defined)))}")
    if re.search(r"^\s*(?:[-*] |\d+\. )?<!--=", text, re.MULTILINE):
        raise PageError(
            f"{page.name}: a line may not begin with a number: Markdown takes the comment as a block"
        )
    if text.count("<!-- figures:") != len(TABLE.findall(text)):
        raise PageError(f"{page.name}: a table's marker is not closed")

    def table(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise PageError(f"{page.name}: there is no table {match[2]}")
        return f"{match[1]}\n{TABLES[match[2]](up)}\n\n{match[4]}"

    def number(match: re.Match[str]) -> str:
        try:
            return f"<!--={match[1]}-->{value(defined[match[1]])}<!--/-->"
        except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
            raise PageError(f"{page.name}: {match[1]} = {defined[match[1]]}: {error}") from error

    return NUMBER.sub(number, TABLE.sub(table, text))


def _definitions(text: str) -> dict[str, str]:
    found = {}
    for block in NUMBERS.findall(text):
        for line in block.strip().splitlines():
            name, equals, definition = line.partition(" = ")
            if not equals or name in found:
                raise PageError(f"not a definition, or a second one: {line}")
            found[name] = definition
    return found


def differences(page: Path) -> list[str]:
    """Return how the page differs from the result files, one line for each difference."""
    now, then = page.read_text(encoding="utf-8").splitlines(), render(page).splitlines()
    where = page.relative_to(ROOT)
    differing = [
        f"{where}:{number}: {before!r} should be {after!r}"
        for number, (before, after) in enumerate(zip(now, then, strict=False), 1)
        if before != after
    ]
    return differing or ([f"{where}: has another number of lines"] if len(now) != len(then) else [])
