"""A prompt that is still arriving, as text: chunks that are edited, and the template they and the query fill.

Plain data and plain functions. An edit is a list of operations that all apply, or none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from streamserve.protocol.errors import RequestError

CONTEXT, QUERY = "{context}", "{query}"
MAX_CHUNKS = 16384
MAX_OPERATIONS = 1024


class StaleVersionError(RequestError):
    """An edit was made for a version of the prompt that is not the current one, which is `version`."""

    def __init__(self, version: int) -> None:
        super().__init__(f"the current version is {version}", field="version", status=409)
        self.version = version


class Operation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One change. `insert` puts a chunk before the one named, `replace` and `remove` change it: by its
    `index` among all, or by its id (`chunk`). At an index behind the last, `insert` appends."""

    op: Literal["append", "insert", "replace", "remove"]
    text: str | None = None
    index: int | None = None
    chunk: str | None = None


@dataclass(frozen=True)
class Chunk:
    """A piece of the context. It keeps its id when its text is replaced."""

    id: str
    text: str


@dataclass(frozen=True)
class Context:
    """The chunks so far. `version` counts the edits, `made` the chunks there have ever been."""

    chunks: tuple[Chunk, ...] = ()
    version: int = 0
    made: int = 0

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    def check(self, version: int) -> None:
        """Raises StaleVersionError if `version` is not the current one."""
        if version != self.version:
            raise StaleVersionError(self.version)

    def edited(self, operations: Sequence[Operation]) -> tuple["Context", list[str]]:
        """The next version, and the id of the chunk that each operation made, changed or removed.

        Raises RequestError naming the first operation that cannot be done.
        """
        if not 0 < len(operations) <= MAX_OPERATIONS:
            raise RequestError(
                f"operations must hold 1 to {MAX_OPERATIONS} of them, got {len(operations)}",
                field="operations",
            )
        chunks, made, touched = list(self.chunks), self.made, []
        for number, operation in enumerate(operations):
            try:
                made += operation.op in ("append", "insert")
                touched.append(_apply(operation, chunks, f"chunk-{made}"))
            except ValueError as error:
                raise RequestError(f"operations[{number}] {error}", field="operations") from None
        if len(chunks) > MAX_CHUNKS:
            raise RequestError(
                f"the context would have {len(chunks)} chunks, and {MAX_CHUNKS} is the limit",
                field="operations",
            )
        return Context(tuple(chunks), self.version + 1, made), touched


def _apply(operation: Operation, chunks: list[Chunk], new_id: str) -> str:
    """Change `chunks`; a new chunk gets `new_id`. Raises ValueError saying what is wrong."""
    if (operation.text is None) != (operation.op == "remove"):
        raise ValueError("(remove) takes no text" if operation.op == "remove" else "needs a text")
    text = operation.text or ""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("has a text that is not Unicode: it holds a lone surrogate")
    place = _place(operation, chunks)
    if operation.op in ("append", "insert"):
        chunks.insert(place, Chunk(new_id, text))
        return new_id
    if operation.op == "replace":
        chunks[place] = replace(chunks[place], text=text)
        return chunks[place].id
    return chunks.pop(place).id


def _place(operation: Operation, chunks: list[Chunk]) -> int:
    """The index an operation is about. Raises ValueError if there is none."""
    index, name = operation.index, operation.chunk
    if operation.op == "append":
        if index is not None or name is not None:
            raise ValueError("(append) takes neither index nor chunk: it goes to the end")
        return len(chunks)
    if (index is None) == (name is None):
        raise ValueError(f"({operation.op}) needs either index or chunk")
    if name is not None:
        for place, chunk in enumerate(chunks):
            if chunk.id == name:
                return place
        raise ValueError(f"names chunk {name!r}, which there is not")
    assert index is not None
    last = len(chunks) if operation.op == "insert" else len(chunks) - 1
    if not 0 <= index <= last:
        raise ValueError(f"has index {index}, but there are {len(chunks)} chunks")
    return index


@dataclass(frozen=True)
class Template:
    """A text in which `{context}` and `{query}` stand for what they say: each once, the query perhaps not
    at all. What is filled in is not looked through again."""

    parts: tuple[str, ...]

    @classmethod
    def parse(cls, source: str, field: str = "template") -> "Template":
        """Raises RequestError about `field` if a placeholder is missing or there twice."""
        if source.count(CONTEXT) != 1 or source.count(QUERY) > 1:
            raise RequestError(
                f"{field} must hold {CONTEXT} once, and {QUERY} at most once",
                field=field.partition("[")[0],
            )
        before, _, behind = source.partition(CONTEXT)
        parts: list[str] = []
        for side in (before, CONTEXT, behind):
            left, found, right = side.partition(QUERY)
            parts += [left, found, right] if found else [side]
        return cls(tuple(parts))

    @property
    def has_query(self) -> bool:
        return QUERY in self.parts

    def render(self, context: str, query: str) -> str:
        """The text with both filled in."""
        values = {CONTEXT: context, QUERY: query}
        return "".join(values.get(part, part) for part in self.parts)
