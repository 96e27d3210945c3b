"""The guide's table of architectures and formats is the table that the matrix declares and tests."""

from tests.matrix.cells import ARCHITECTURES, FORMATS
from tests.matrix.page import PAGE, rendered, table


def test_the_page_has_the_declared_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == rendered(), "write the table by python -m tests.matrix.page"


def test_the_table_has_every_format_and_what_is_refused() -> None:
    rows = [line.strip("| ").split(" | ") for line in table().strip().splitlines()[2:]]
    assert [row[0] for row in rows] == list(FORMATS)
    assert ["AWQ", str(len(ARCHITECTURES) - 1), "gpt_oss"] in rows
    assert ["bfloat16", str(len(ARCHITECTURES)), "-"] in rows
