"""The page on reading order lists each package once, with its number of lines."""

import re

import pytest

from tests.docs.pages import DOCS, ROOT

SOURCE = ROOT / "src" / "streamserve"
ROW = re.compile(r"^\| `([\w/]+)/` \| .+ \| (\d+) \|$", re.MULTILINE)
ROWS = ROW.findall((DOCS / "design" / "index.md").read_text(encoding="utf-8"))


def packages() -> set[str]:
    """Return the packages with code; optional ones as `extras/` with their name."""
    folders = [
        folder for folder in (*SOURCE.iterdir(), *(SOURCE / "extras").iterdir()) if list(folder.glob("*.py"))
    ]
    return {folder.relative_to(SOURCE).as_posix() for folder in folders} - {"extras"}


def test_each_package_is_listed_once() -> None:
    assert sorted(name for name, _ in ROWS) == sorted(packages())


@pytest.mark.parametrize(("package", "stated"), ROWS)
def test_the_number_of_lines_is_stated_to_within_a_tenth(package: str, stated: str) -> None:
    files = sorted((SOURCE / package).rglob("*.py"))
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert abs(int(stated) - lines) <= 0.1 * lines
