"""The diffs of the how-to pages apply to the current source."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

PAGES = sorted(page for page in (DOCS / "design" / "howto").glob("*.md") if page.stem != "index")


def applies(diff: str) -> str:
    """Return why a diff does not apply to the checkout; an empty string if it applies."""
    command = ["git", "apply", "--check", "--whitespace=nowarn", "-"]
    return subprocess.run(command, cwd=ROOT, input=diff, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_applies(page: Path) -> None:
    (diff,) = re.findall(r"^```diff\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert applies(diff) == ""


def test_a_diff_that_does_not_apply_is_named() -> None:
    assert "README.md" in applies("--- a/README.md\n+++ b/README.md\n@@ -1,1 +1,1 @@\n-absent\n+x\n")
