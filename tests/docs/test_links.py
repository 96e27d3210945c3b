"""Every relative link and anchor of the pages has a target, and the site's navigation has every page."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, anchors, links, prose


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every link leads to a file. A folder would not work in the site, which has a copy of each linked
    file."""
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
        if target.is_dir() and page.is_relative_to(DOCS):
            broken.append(link)
    assert not broken


def test_links_are_found() -> None:
    assert sum(len(links(page)) for page in PAGES) > 100


def test_the_navigation_has_every_page() -> None:
    named = set(re.findall(r"^\s*- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_pages_have_one_title_and_are_not_long(page: Path) -> None:
    assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 350


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lists_begin_after_an_empty_line(page: Path) -> None:
    """A list follows an empty line: Python-Markdown would take it as part of the sentence before."""
    text = prose(page)
    assert not re.findall(r"^[A-Za-z`*(][^\n|]*[^\n]\n(?:[-*]|1\.) .*$", text, re.MULTILINE)
