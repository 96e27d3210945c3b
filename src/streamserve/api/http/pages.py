"""Paginated lists as in OpenAI's API, with the parameters limit, order and after."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from streamserve.protocol.errors import RequestError

T = TypeVar("T")

PARAMETERS: tuple[dict[str, Any], ...] = (
    {
        "name": "limit",
        "in": "query",
        "description": "maximum number of entries",
        "schema": {"type": "integer", "minimum": 1},
    },
    {
        "name": "order",
        "in": "query",
        "description": "newest first (desc, the default), or oldest first (asc)",
        "schema": {"enum": ["asc", "desc"]},
    },
    {
        "name": "after",
        "in": "query",
        "description": "the id of an entry: the list continues after it",
        "schema": {"type": "string"},
    },
)


class ListReply(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a list. If it `has_more`, the next page begins after `last_id`."""

    object: str = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass(frozen=True)
class Page:
    """The page that a request asks for."""

    limit: int
    newest_first: bool
    after: str | None

    def of(self, entries: Sequence[tuple[str, T]]) -> tuple[list[tuple[str, T]], bool]:
        """Return the entries of the page, and whether more follow. `entries` are all entries with their ids,
        the oldest first.

        Raises RequestError if there is no entry `after`.
        """
        ordered = list(reversed(entries)) if self.newest_first else list(entries)
        if self.after is not None:
            index = next((i for i, (name, _) in enumerate(ordered) if name == self.after), None)
            if index is None:
                raise RequestError(f"after: there is no entry {self.after[:100]!r}", field="after")
            ordered = ordered[index + 1 :]
        return ordered[: self.limit], len(ordered) > self.limit


def page_of(request: Request, default: int, maximum: int) -> Page:
    """Return the page that the query asks for. Raises RequestError naming an invalid parameter."""
    query = request.query_params
    text, order = query.get("limit", str(default)), query.get("order", "desc")
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= maximum):
        raise RequestError(f"limit must be between 1 and {maximum}", field="limit")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc", field="order")
    return Page(int(text), order == "desc", query.get("after"))


def list_reply(entries: Sequence[tuple[str, Any]], has_more: bool) -> ListReply:
    """Return the reply for a page of `entries` with their ids."""
    return ListReply(
        data=[entry for _, entry in entries],
        first_id=entries[0][0] if entries else None,
        last_id=entries[-1][0] if entries else None,
        has_more=has_more,
    )
