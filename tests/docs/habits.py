"""The tables of docs/guides/coming-from.md, rendered from the habits: `python -m tests.docs.habits` writes
them."""

import re
from collections.abc import Iterable

from streamserve.settings.habits.habit import Kind, Program, spelled
from streamserve.settings.habits.table import HABITS, SAME
from tests.docs.pages import DOCS

PAGE = DOCS / "guides" / "coming-from.md"
TABLE = re.compile(r"(<!-- habits: (\S+) -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
ANSWERS: dict[Kind, str] = {
    "taken": "taken",
    "instead": "instead",
    "idle": "no effect",
    "refused": "refused",
}


def table(program: Program) -> str:
    """Return the table of a program: settings with the same name, then its habits by what becomes of them."""
    rows = [
        f"| {_code(habit.names)} | {answer} | {spelled(habit.here, as_flags=True)} |"
        for kind, answer in ANSWERS.items()
        for habit in HABITS
        if habit.kind == kind and program in habit.programs
    ]
    if SAME[program]:
        same = (f"--{name.replace('_', '-')}" for name in SAME[program])
        rows.insert(0, f"| {_code(same)} | taken | the same |")
    return "\n".join(["", f"| {program} | | here |", "|---|---|---|", *rows, "", ""])


def rendered() -> str:
    """Return the page with its tables as the habits are declared."""
    programs: dict[str, Program] = {program: program for program in SAME}
    text = PAGE.read_text(encoding="utf-8")
    return TABLE.sub(lambda match: match[1] + table(programs[match[2]]), text)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
