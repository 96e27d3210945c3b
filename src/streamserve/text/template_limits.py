"""Jinja for the templates of unknown checkpoints: in a sandbox, and with limits of time and size.

Loops count their iterations, and macros their calls. Operators, joins and JSON count the lengths of the texts
and lists that they make. Large widths are refused in formats, filters and methods of texts.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_eval_context
from jinja2.filters import do_format, do_join, make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_ITERATIONS = 1 << 22
"""Limit of the iterations of all loops in one rendering: about a second of computing. A loop over 2,000
messages within another loop over them reaches it."""
CALL, VALUE = 16, 4
"""Number of iterations that a macro call, and a value written as JSON, count as: they take as long."""
MAX_CHARACTERS = 1 << 27
"""Limit of the length of one text or list. All texts and lists of one rendering together may have the length
`MAX_TOTAL`: a loop that adds to a text makes a new text in each iteration."""
MAX_TOTAL = 1 << 30
MAX_BITS = 1 << 16
"""Limit of the length of an integer, in bits."""
MAX_WIDTH = 1 << 20
"""Largest number that a filter or a method of a text accepts: it may be the width of the result."""

_COUNT, _JOIN = "count iteration", "join texts"  # names of filters that no template can write
_FILTERS_WITH_NUMBERS = ("batch", "center", "indent", "slice")
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\*|\d{7})")
_WIDE_FIELD = re.compile(r"\{[^}]*\d{7}")


class TemplateLimitError(TemplateError):
    """A template exceeds its limits."""


class SlowRenderingError(Exception):
    """A rendering exceeds the limits of `quick`: repeat it where it may take long."""


@dataclass
class _Left:
    iterations: int
    characters: int


_left: ContextVar[_Left] = ContextVar("what a rendering may still do")
_quick: ContextVar[bool] = ContextVar("whether renderings must be quick", default=False)
QUICK_ITERATIONS, QUICK_CHARACTERS = 1 << 14, 1 << 22
"""Limits of a rendering within `quick`: some milliseconds."""


@contextmanager
def quick() -> Iterator[None]:
    """Make renderings within the block raise SlowRenderingError if they take more than some milliseconds."""
    token = _quick.set(True)
    try:
        yield
    finally:
        _quick.reset(token)


def ensure_quick(characters: int) -> None:
    """Raise SlowRenderingError within `quick` if reading this number of `characters` takes more than some
    milliseconds."""
    if _quick.get() and characters > QUICK_CHARACTERS:
        raise SlowRenderingError


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja environment with limits. Use `render` to render its templates."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters |= {name: _bounded(self.filters[name]) for name in _FILTERS_WITH_NUMBERS}
        self.filters |= {_COUNT: _count_iterations, _JOIN: _join_texts, "join": _join, "format": _format}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounding().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of an operation. Raises TemplateLimitError if it would be too large."""
        if operator == "%":
            _check_percent(left)
        elif operator == "+":
            _count_length(_length(left) + _length(right))
        elif operator == "*":
            _check_bits(_bits(left) + _bits(right))
            _count_length(_length(left) * _times(right) + _length(right) * _times(left))
        else:
            _check_bits(_bits(left) * _times(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method. Raises TemplateLimitError if a method of a text gets a large number."""
        if isinstance(getattr(called, "__self__", None), str):
            _check_numbers((*args, *kwargs.values()))
        return super().call(context, called, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the function that a template gets as `format` of a text.

        Raises TemplateLimitError if the text has a large width.
        """
        if isinstance(text := getattr(value, "__self__", None), str) and _WIDE_FIELD.search(text):
            raise TemplateLimitError("a format has a large width")
        return super().wrap_str_format(value)


def render(pieces: Iterator[str]) -> str:
    """Return the text of a template's `pieces` (Template.generate).

    Raises TemplateLimitError if the template exceeds its limits, or SlowRenderingError within `quick`.
    """
    hurried = _quick.get()
    limits = (QUICK_ITERATIONS, QUICK_CHARACTERS) if hurried else (MAX_ITERATIONS, MAX_TOTAL)
    token = _left.set(_Left(*limits))
    try:
        text = []
        for piece in pieces:
            _count_length(len(piece))
            text.append(piece)
        return "".join(text)
    except TemplateLimitError as error:
        if hurried:
            raise SlowRenderingError from error
        raise
    finally:
        _left.reset(token)


def check_nodes(value: Any) -> None:
    """Count the values in nested lists and mappings. Raises TemplateLimitError if there are too many."""
    waiting = [value]
    while waiting:
        _count_iterations(VALUE)
        nested = waiting.pop()
        if isinstance(nested, dict):
            waiting += nested.values()
        elif isinstance(nested, list | tuple):
            waiting += nested
        else:
            _count_length(_length(nested))


class _Bounding(NodeTransformer):
    """Makes loops and macros count against the limits, and the texts that `~` joins too."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_counting(1, node.lineno), lineno=node.lineno))
        if node.test is not None:  # items that the test leaves out count too
            node.test = nodes.And(_counting(1, node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_counting(CALL, node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        values = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(values, _JOIN, [], [], None, None, lineno=node.lineno)


def _counting(iterations: int, line: int) -> nodes.Filter:
    """Return a call of `_count_iterations`, as a filter: Jinja calls filters faster than functions."""
    return nodes.Filter(nodes.Const(iterations), _COUNT, [], [], None, None, lineno=line)


def _count_iterations(number: int) -> bool:
    left = _left.get()
    left.iterations -= number
    if left.iterations < 0:
        raise TemplateLimitError(f"its loops have not ended after {MAX_ITERATIONS} iterations")
    return True


def _count_length(length: int) -> None:
    left = _left.get()
    left.characters -= length
    if length > MAX_CHARACTERS or left.characters < 0:
        raise TemplateLimitError("it makes texts or lists that are too long")


def _join_texts(values: list[Any]) -> str:
    texts = [str(value) for value in values]
    _count_length(sum(map(len, texts)))
    return "".join(texts)


@pass_eval_context
def _join(
    context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    """Jinja's filter `join`, which counts the length of its result."""
    items = list(value if attribute is None else map(make_attrgetter(context.environment, attribute), value))
    _count_length(sum(len(str(item)) for item in items) + len(items) * len(str(d)))
    return str(do_join(context, items, d))


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter `function`, which then refuses large numbers."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return bounded


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    """Apply Jinja's filter `format`. Raises TemplateLimitError for large widths."""
    _check_percent(value)
    return str(do_format(value, *args, **kwargs))


def _check_numbers(arguments: Iterable[Any]) -> None:
    if any(isinstance(argument, int) and abs(argument) > MAX_WIDTH for argument in arguments):
        raise TemplateLimitError(f"a width is above {MAX_WIDTH}")


def _check_percent(text: Any) -> None:
    if isinstance(text, str) and _WIDE_PERCENT.search(text):
        raise TemplateLimitError("a format has a large width, or one that is not written in it")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimitError(f"an integer has more than {MAX_BITS} bits")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _times(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0
