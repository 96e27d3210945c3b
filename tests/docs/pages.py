"""Read the Markdown pages: their links, headings and tables."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
    *sorted(DOCS.rglob("*.md")),
]

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|^(?: {4}[^\n]*\n)+|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Return the page without code, in which links are not links."""
    return CODE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Return the targets of the page's relative links."""
    return [
        link for link in LINK.findall(prose(page)) if "://" not in link and not link.startswith("mailto:")
    ]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of the page's headings, as MkDocs and GitHub make them from plain words."""
    headings = re.findall(r"^#+ (.*?)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings
    )
