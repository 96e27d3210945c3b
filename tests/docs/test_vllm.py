"""The page on differences from vLLM says of each field what the code does with it."""

import re

import pytest

from tests.docs.pages import DOCS
from tests.docs.test_fields import CLASSES, ROUTES, fields_of

ROW = re.compile(r"^\| `(\w+)` \| ([a-z, ]+) \| (refused|without effect) \| .+ \|$", re.MULTILINE)
ROWS = ROW.findall((DOCS / "guides" / "vllm.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("field", "routes", "kind"), ROWS)
def test_a_field_is_treated_as_the_page_says(field: str, routes: str, kind: str) -> None:
    names = routes.split(", ")
    assert set(names) <= ROUTES.keys()
    (name,) = (one for one in CLASSES if one.startswith(kind))
    assert all(field in fields_of(name, route) for route in names)


def test_the_page_has_the_table() -> None:
    assert len(ROWS) > 30
