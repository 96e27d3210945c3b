"""The page on differences from vLLM lists all fields that differ, and describes correctly how the code
handles them."""

import re

import msgspec
import pytest

from streamserve.api.openai import replies
from streamserve.extras.responses import response_schemas
from tests.docs.fields import CLASSES, ROUTES, fields_of
from tests.docs.pages import DOCS, ROOT
from tests.docs.vllm_fields import EVENTS, REPLIES, REQUESTS

ROW = re.compile(r"^\| `(\w+)` \| ([a-z, ]+) \| (refused|without effect) \| .+ \|$", re.MULTILINE)
PAGE = (DOCS / "guides" / "vllm.md").read_text(encoding="utf-8")
ROWS = ROW.findall(PAGE)
ABSENT = re.compile(r"^\| (`[^|]+`) \| ([a-z, ]+) \| absent \| .+ \|$", re.MULTILINE)
ABSENT_ROWS = [
    (field, part)
    for fields, parts in ABSENT.findall(PAGE)
    for field in re.findall(r"`([\w.]+)`", fields)
    for part in parts.split(", ")
]
PARTS: dict[str, type[msgspec.Struct]] = {
    "completion": replies.CompletionReply,
    "completion choice": replies.CompletionChoice,
    "chat": replies.ChatReply,
    "chat choice": replies.ChatChoice,
    "chat message": replies.ChatMessage,
    "response": response_schemas.ResponseReply,
    "response usage": response_schemas.ResponseUsage,
    "input details": response_schemas.InputTokensDetails,
    "output details": response_schemas.OutputTokensDetails,
}


@pytest.mark.parametrize(("field", "routes", "kind"), ROWS)
def test_a_field_is_treated_as_the_page_says(field: str, routes: str, kind: str) -> None:
    names = routes.split(", ")
    assert set(names) <= ROUTES.keys()
    (name,) = (one for one in CLASSES if one.startswith(kind))
    assert all(field in fields_of(name, route) for route in names)


def test_the_page_has_the_table() -> None:
    assert len(ROWS) > 30


@pytest.mark.parametrize("route", REQUESTS)
def test_every_request_field_of_vllm_is_obeyed_or_in_the_table(route: str) -> None:
    listed = {field for field, routes, _ in ROWS if route in routes.split(", ")}
    assert REQUESTS[route] - fields_of(CLASSES[0], route) - listed == set()


@pytest.mark.parametrize("part", PARTS)
def test_every_reply_field_of_vllm_is_there_or_in_the_table(part: str) -> None:
    here = set(PARTS[part].__struct_fields__)
    listed = {field for field, where in ABSENT_ROWS if where == part}
    assert REPLIES[part] - here == listed


def test_every_event_of_vllm_is_there_or_in_the_table() -> None:
    folders = (
        ROOT / "src/streamserve" / name for name in ("api/openai", "extras/responses", "extras/pooling")
    )
    sources = "".join(file.read_text() for folder in folders for file in folder.glob("*.py"))
    listed = {field for field, where in ABSENT_ROWS if where == "events"}
    missing = {event for event in EVENTS if f'"{event}"' not in sources}
    assert missing == listed | {"response.completed"}
    assert 'f"response.{response.status}"' in sources, "the last event's name depends on the status"
