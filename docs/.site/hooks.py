"""MkDocs hooks: copy the repository files that pages link to into the site: it is complete offline."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside of docs/ that a page links to."""
    docs = Path(config.docs_dir)
    linked = {
        target
        for page in files.documentation_pages()
        for _, link, _ in LINK.findall(Path(page.abs_src_path).read_text(encoding="utf-8"))
        if (target := _outside(docs, page.src_uri, link))
    }
    for target in sorted(linked):
        path = docs.parent / target
        files.append(File.generated(config, f"files/{target}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links that leave docs/ to the copies."""
    docs = Path(config.docs_dir)
    above = "../" * page.file.src_uri.count("/")

    def link(match: re.Match[str]) -> str:
        target = _outside(docs, page.file.src_uri, match[2])
        return f"{match[1]}{above}files/{target}{match[3]}" if target else match[0]

    return LINK.sub(link, markdown)


def _outside(docs: Path, page: str, link: str) -> str | None:
    """Return the linked file relative to the repository if it is not in docs/, else None."""
    path = Path(os.path.normpath(docs / Path(page).parent / link))
    return None if path.is_relative_to(docs) else path.relative_to(docs.parent).as_posix()
