"""The tables of settings of other programs are as the code declares them."""

from streamserve.settings.habits.table import HABITS, SAME
from tests.docs.habits import PAGE, TABLE, rendered


def test_the_page_is_rendered_from_the_habits() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == rendered(), "run: python -m tests.docs.habits"
    assert {match[2] for match in TABLE.finditer(text)} == set(SAME)


def test_every_habit_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for habit in HABITS for name in habit.names if f"`{name}`" not in text] == []
