"""The table of the matrix in docs/guides/checkpoints.md: `python -m tests.matrix.page` writes it."""

import re
from pathlib import Path

from tests.matrix.cells import ARCHITECTURES, FORMATS, REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "checkpoints.md"
TABLE = re.compile(r"(?<=<!-- tests/matrix -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)


def table() -> str:
    """Return a row for each format: how many architectures are served in it, and which are refused."""
    head = f"| format | of {len(ARCHITECTURES)} architectures served | refused by name |"
    lines = ["", head, "|---|---|---|"]
    for format in FORMATS:
        refused = [name for name in ARCHITECTURES if (name, format) in REFUSED]
        lines.append(f"| {format} | {len(ARCHITECTURES) - len(refused)} | {', '.join(refused) or '-'} |")
    return "\n".join([*lines, "", ""])


def rendered() -> str:
    """Return the page with the table as it is declared."""
    text = PAGE.read_text(encoding="utf-8")
    if not TABLE.search(text):
        raise ValueError(f"{PAGE.name} has no place for the table")
    return TABLE.sub(lambda match: table(), text)


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
