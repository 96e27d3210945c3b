"""The API guide's table of fields is generated from the code that obeys, accepts and refuses them."""

import msgspec
import pytest

from tests.docs.fields import CLASSES, ROUTES, fields_of
from tests.docs.pages import DOCS

UNKNOWN = "| unknown (warning) | all | every other field |"


def table() -> str:
    """Return the table: for each class its fields, with the routes to which the class applies."""
    lines = ["| class | routes | fields |", "|---|---|---|"]
    for kind in CLASSES:
        by_routes: dict[tuple[str, ...], list[str]] = {}
        for name in sorted(set().union(*(fields_of(kind, route) for route in ROUTES))):
            routes = tuple(route for route in ROUTES if name in fields_of(kind, route))
            by_routes.setdefault(routes, []).append(f"`{name}`")
        for routes, names in sorted(by_routes.items(), key=lambda item: (-len(item[0]), item[0])):
            where = "all" if len(routes) == len(ROUTES) else ", ".join(routes)
            lines.append(f"| {kind} | {where} | {', '.join(names)} |")
    return "\n".join([*lines, UNKNOWN])


def test_the_guide_has_the_table() -> None:
    page = DOCS / "guides" / "api.md"
    assert table() in page.read_text(encoding="utf-8"), f"copy this table into {page.name}:\n{table()}"


@pytest.mark.parametrize("route", ROUTES)
def test_a_field_has_one_class(route: str) -> None:
    obeyed, taken, refused = (fields_of(kind, route) for kind in CLASSES)
    assert not obeyed & taken
    assert not obeyed & refused
    assert not taken & refused
    assert len(msgspec.structs.fields(ROUTES[route][0])) == len(obeyed)
