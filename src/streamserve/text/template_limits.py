"""Jinja for the templates of unknown checkpoints: sandboxed, and with an end in time and size.

Loops count their iterations. Sums, products, powers and joined texts are refused where they would be too
large, and so is the whole text.
"""

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_ITERATIONS = 1 << 22
"""Iterations of all loops of one rendering: a second of computing. A loop over messages within another has as
many for 2,000 messages."""
MAX_CHARACTERS = 1 << 27
MAX_BITS = 1 << 16
"""Length of an integer."""

_COUNT, _JOIN = "count_iteration", "join_texts"
_left: ContextVar[list[int]] = ContextVar("iterations left")


class TemplateLimitError(TemplateError):
    """A template has not ended within its limits."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates `render` renders."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters[_COUNT] = _count_iteration
        self.globals[_JOIN] = _join_texts

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounding().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of an operation. Raises TemplateLimitError where it would be too large."""
        if _too_large(operator, left, right):
            raise TemplateLimitError(f"the result of a {operator} is too large")
        return super().call_binop(context, operator, left, right)


def render(pieces: Iterator[str]) -> str:
    """Return the text of a template's `pieces` (Template.generate). Raises TemplateLimitError."""
    token = _left.set([MAX_ITERATIONS])
    try:
        text, size = [], 0
        for piece in pieces:
            text.append(piece)
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise TemplateLimitError(f"its text has more than {MAX_CHARACTERS} characters")
        return "".join(text)
    finally:
        _left.reset(token)


class _Bounding(NodeTransformer):
    """Counts the iterations of loops, and bounds what `~` joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        # A filter is called faster than what a template might call.
        counting = nodes.Filter(nodes.Const(None), _COUNT, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(counting, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        name = nodes.Name(_JOIN, "load", lineno=node.lineno)
        return nodes.Call(name, node.nodes, [], None, None, lineno=node.lineno)


def _count_iteration(_: None) -> None:
    left = _left.get()
    left[0] -= 1
    if left[0] < 0:
        raise TemplateLimitError(f"its loops have not ended after {MAX_ITERATIONS} iterations")


def _join_texts(*values: Any) -> str:
    texts = [str(value) for value in values]
    if sum(map(len, texts)) > MAX_CHARACTERS:
        raise TemplateLimitError("the result of a ~ is too large")
    return "".join(texts)


def _too_large(operator: str, left: Any, right: Any) -> bool:
    if operator == "+":
        return _length(left) + _length(right) > MAX_CHARACTERS
    if operator == "**":
        return _bits(left) * _times(right) > MAX_BITS
    repeated = _length(left) * _times(right) + _length(right) * _times(left)
    return repeated > MAX_CHARACTERS or _bits(left) + _bits(right) > MAX_BITS


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _times(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0
