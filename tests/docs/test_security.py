"""Each line in the table of access by tenant (docs/operations/security.md) names a test that exists."""

import re

from tests.docs.pages import DOCS, ROOT

TABLE = DOCS / "operations" / "security.md"
TESTS = ROOT / "tests" / "api" / "test_callers.py"


def test_each_line_names_its_test() -> None:
    section = TABLE.read_text(encoding="utf-8").partition("## Access by tenant")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (?!What \|).*$", section, re.MULTILINE)
    assert len(lines) > 8, "the table was not found"
    named = [re.search(r"`(test_\w+)` \|$", line) for line in lines]
    tests = set(re.findall(r"^def (test_\w+)", TESTS.read_text(encoding="utf-8"), re.MULTILINE))
    assert {match[1] if match else "" for match in named} <= tests
