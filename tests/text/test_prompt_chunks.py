"""Chunks are edited like a list. Each edit is applied completely or not at all, and templates are rendered
once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.errors import RequestError
from streamserve.text import prompt_chunks
from streamserve.text.prompt_chunks import ChunkOperation, ContextVersion, StaleVersionError, Template


def texts(context: ContextVersion) -> list[str]:
    return [chunk.text for chunk in context.chunks]


def append(*texts: str) -> list[ChunkOperation]:
    return [ChunkOperation(op="append", text=text) for text in texts]


def test_the_four_operations() -> None:
    first, ids = ContextVersion().edited(append("a", "b", "c"))
    assert (texts(first), first.version, ids) == (["a", "b", "c"], 1, ["chunk-1", "chunk-2", "chunk-3"])
    second, touched = first.edited(
        [
            ChunkOperation(op="insert", text="x", index=0),
            ChunkOperation(op="insert", text="y", chunk="chunk-3"),
            ChunkOperation(op="replace", text="A", chunk="chunk-1"),
            ChunkOperation(op="remove", index=2),
            ChunkOperation(op="insert", text="z", index=4),
        ]
    )
    assert texts(second) == ["x", "A", "y", "c", "z"]
    assert touched == ["chunk-4", "chunk-5", "chunk-1", "chunk-2", "chunk-6"]
    assert second.text == "xAycz"
    assert texts(first) == ["a", "b", "c"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "insert", "replace", "remove"]), st.integers(0, 9), st.text()),
        max_size=30,
    )
)
def test_chunks_are_as_a_list_that_is_edited(script: list[tuple[str, int, str]]) -> None:
    context, model = ContextVersion(), list[str]()
    for op, number, text in script:
        if op == "append" or not model:
            model.append(text)
            operation = ChunkOperation(op="append", text=text)
        else:
            index = number % len(model)
            place = {"chunk": context.chunks[index].id} if number % 2 else {"index": index}
            if op == "remove":
                model.pop(index)
                operation = ChunkOperation(op="remove", **place)
            else:
                model[index : index + (op == "replace")] = [text]
                operation = ChunkOperation(op=op, text=text, **place)  # type: ignore[arg-type]
        context, _ = context.edited([operation])
    assert texts(context) == model
    assert context.version == len(script)
    assert len({chunk.id for chunk in context.chunks}) == len(model)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (ChunkOperation(op="append"), "needs a text"),
        (ChunkOperation(op="append", text="a", index=0), "neither index nor chunk"),
        (ChunkOperation(op="insert", text="a"), "either index or chunk"),
        (ChunkOperation(op="insert", text="a", index=0, chunk="chunk-1"), "either index or chunk"),
        (ChunkOperation(op="insert", text="a", index=4), "index 4, but there are 3"),
        (ChunkOperation(op="replace", text="a", index=3), "index 3, but there are 3"),
        (ChunkOperation(op="replace", text="a", index=-1), "index -1"),
        (ChunkOperation(op="replace", text="a", chunk="chunk-9"), "'chunk-9', which does not exist"),
        (ChunkOperation(op="remove", text="a", index=0), "takes no text"),
        (ChunkOperation(op="append", text="a\ud800"), "not Unicode"),
    ],
)
def test_an_invalid_operation_changes_nothing(operation: ChunkOperation, message: str) -> None:
    context, _ = ContextVersion().edited(append("a", "b"))
    with pytest.raises(RequestError, match=rf"operations\[1\].*{message}") as caught:
        context.edited([*append("c"), operation])
    assert caught.value.field == "operations"
    assert texts(context) == ["a", "b"]


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_chunks, "MAX_CHUNKS", 3)
    monkeypatch.setattr(prompt_chunks, "MAX_OPERATIONS", 2)
    context, _ = ContextVersion().edited(append("a", "b"))
    for operations in (append("c", "d"), append("c", "d", "e"), []):
        with pytest.raises(RequestError):
            context.edited(operations)


def test_a_stale_version_error_has_the_current_version() -> None:
    context, _ = ContextVersion().edited(append("a"))
    context.check(1)
    with pytest.raises(StaleVersionError, match="is 1") as caught:
        context.check(0)
    assert (caught.value.version, caught.value.status) == (1, 409)


def test_templates() -> None:
    template = Template.parse("Read: {context}\n\nQ: {query}?")
    assert template.has_query
    assert template.render("a {query} {context}", "why") == "Read: a {query} {context}\n\nQ: why?"
    assert Template.parse("{query} {context}.").render("c", "q {context}") == "q {context} c."
    assert not Template.parse("<{context}>").has_query


@pytest.mark.parametrize("source", ["", "{query}", "{context}{context}", "{context}{query}{query}"])
def test_templates_that_cannot_be_filled(source: str) -> None:
    with pytest.raises(RequestError, match="once"):
        Template.parse(source)
