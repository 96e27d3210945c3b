"""Jinja for the templates of unknown checkpoints: in a sandbox, and with limits of time and size.

Loops count their iterations, and macros their calls. Operators, filters and methods count the lengths of the
texts and lists that they make. Large widths are refused in formats, filters and methods of texts.

A list may contain another list twice, and so on: written or compared, it takes exponential time. Such values
count as the texts that they would become, wherever they are written, compared, hashed or given to a filter or
a method.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from jinja2 import Environment, TemplateError, nodes, pass_context, pass_environment, pass_eval_context
from jinja2.filters import do_format, do_join, do_replace, make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from streamserve.text.template_nodes import COUNT, JOIN, NESTED, SEARCHED, CountingNodes

MAX_ITERATIONS = 1 << 22
"""Limit of the iterations of all loops in one rendering: about a second of computing. A loop over 2,000
messages within another loop over them reaches it."""
VALUE = 4
"""Number of iterations that a value written as JSON counts as: it takes as long."""
MAX_CHARACTERS = 1 << 27
"""Limit of the length of one text or list. All texts and lists of one rendering together may have the length
`MAX_TOTAL`: a loop that adds to a text makes a new text in each iteration."""
MAX_TOTAL = 1 << 30
MAX_BITS = 1 << 16
"""Limit of the length of an integer, in bits."""
MAX_WIDTH = 1 << 20
"""Largest number that a filter or a method of a text accepts: it may be the width of the result."""

MAX_SECONDS = 30.0
"""Limit of a rendering in seconds of processor time, for operations on long texts, which are not counted."""

SQUARED = 256
"""One iteration for this many units of a text's length squared, in filters that take as long."""

_FILTERS_WITH_NUMBERS = ("batch", "center", "indent", "slice")
_FILTERS_OF_ITEMS = ("map", "reject", "rejectattr", "select", "selectattr")
_SLOW_FILTERS = ("striptags", "urlize", "wordwrap")
"""Filters that may take time in proportion to the square of a text's length."""
_FILTERS_OF_NESTED = (
    "capitalize", "center", "dictsort", "e", "escape", "forceescape", "groupby", "indent", "lower", "max",
    "min", "pprint", "safe", "sort", "string", "striptags", "title", "trim", "truncate", "unique", "upper",
    "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr",
)  # fmt: skip
"""Filters that write or compare their arguments."""
_TESTS_OF_NESTED = ("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "gt", "in", "le", "lt", "ne")
_CONTAINERS: tuple[Any, ...] = (list, tuple, dict, type({}.items()), type({}.values()))
_WRITTEN: tuple[Any, ...] = (*_CONTAINERS, Namespace)
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
    until: float
    """Processor time of the thread, in seconds."""


_left: ContextVar[_Left] = ContextVar("what a rendering may still do")
_quick: ContextVar[bool] = ContextVar("whether renderings must be quick", default=False)
QUICK_ITERATIONS, QUICK_CHARACTERS, QUICK_SECONDS = 1 << 14, 1 << 22, 0.02
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
        # Without the optimizer, constant expressions are evaluated, and counted, when a template is rendered.
        super().__init__(finalize=_written, optimized=False, **options)
        self.filters |= {name: _bounded(self.filters[name]) for name in _FILTERS_WITH_NUMBERS}
        self.filters |= {name: _counting_items(self.filters[name]) for name in _FILTERS_OF_ITEMS}
        self.filters |= {name: _counting_square(self.filters[name]) for name in _SLOW_FILTERS}
        self.filters |= {name: _counting_nested(self.filters[name]) for name in _FILTERS_OF_NESTED}
        self.filters |= {COUNT: _count_iterations, JOIN: _join_texts, NESTED: _counted}
        self.filters |= {SEARCHED: _searched, "join": _join, "format": _format}
        self.filters |= {"replace": _replace, "sum": _sum}
        tests: dict[str, Any] = self.tests
        tests |= {name: _counting_nested(tests[name]) for name in _TESTS_OF_NESTED}
        del self.globals["lipsum"]  # writes as many random words as it is told

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = CountingNodes().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of an operation. Raises TemplateLimitError if it would be too large."""
        if operator == "%":
            _check_percent(left)
            _count_fields(left, "%", right if isinstance(right, tuple) else (right,))
        elif operator == "+":
            _count_length(_length(left) + _length(right))
        elif operator == "*":
            _check_bits(_bits(left) + _bits(right))
            _count_length(_length(left) * _times(right) + _length(right) * _times(left))
        else:
            _check_bits(_bits(left) * _times(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method. Raises TemplateLimitError if a method of a text or a number gets a large
        number, or if the result would be too large."""
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str | bytes | int):
            _check_numbers((*args, *kwargs.values()))
        if isinstance(owner, str | bytes | list | tuple | dict):
            name = called.__name__
            args = ([*args[0]],) if name == "join" and len(args) == 1 else args
            _count_nested((*args, *kwargs.values()))
            _count_method(owner, name, (*args, *kwargs.values()))
        return super().call(context, called, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item of `obj`; `argument` is hashed if it is a tuple."""
        _count_nested((argument,))
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the function that a template gets as `format` of a text.

        Raises TemplateLimitError if the text has a large width.
        """
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = str(value.__self__)
        if _WIDE_FIELD.search(text):
            raise TemplateLimitError("a format has a large width")
        return partial(_format_by_method, wrapped, text)


def render(pieces: Iterator[str]) -> str:
    """Return the text of a template's `pieces` (Template.generate).

    Raises TemplateLimitError if the template exceeds its limits, or SlowRenderingError within `quick`.
    """
    hurried = _quick.get()
    limits = (QUICK_ITERATIONS, QUICK_CHARACTERS) if hurried else (MAX_ITERATIONS, MAX_TOTAL)
    token = _left.set(_Left(*limits, time.thread_time() + (QUICK_SECONDS if hurried else MAX_SECONDS)))
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
        elif isinstance(nested, _CONTAINERS):
            waiting += nested
        elif isinstance(nested, Namespace):
            raise TemplateLimitError("it writes or compares a namespace")
        else:
            _count_length(_length(nested))


def _count_iterations(number: int) -> bool:
    left = _left.get()
    left.iterations -= number
    if left.iterations < 0:
        raise TemplateLimitError(f"its loops have not ended after {MAX_ITERATIONS} iterations")
    if left.iterations % 16 < number and time.thread_time() > left.until:
        raise TemplateLimitError(f"it has not ended after {MAX_SECONDS:.0f} s of processor time")
    return True


def _count_length(length: int) -> None:
    left = _left.get()
    left.characters -= length
    if length > MAX_CHARACTERS or left.characters < 0:
        raise TemplateLimitError("it makes texts or lists that are too long")


def _count_nested(values: Iterable[Any]) -> None:
    """Count the nodes of those `values` that are nested."""
    for value in values:
        if isinstance(value, _CONTAINERS):
            check_nodes(value)


def _counted(value: Any) -> Any:
    """Return a value that is compared or hashed, and count its nodes."""
    _count_nested((value,))
    return value


def _searched(value: Any) -> Any:
    """Return a value that another one is compared with, or searched in, and count the nodes of its items. A
    mapping is searched without comparing its values."""
    if isinstance(value, list | tuple) and any(isinstance(item, _CONTAINERS) for item in value):
        check_nodes(value)
    return value


@pass_context
def _written(context: Context, value: Any) -> Any:
    """Return a value that is written, and count its nodes."""
    if isinstance(value, _WRITTEN):
        check_nodes(value)
    return value


def _counting_nested(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or a test that counts the nodes of its arguments."""

    @wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        _count_nested((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return counting


def _counting_items(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts an iteration for each item of its value, which is its second argument."""

    @wraps(function)
    def counting(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        items = (item for item in value if _count_iterations(1)) if value else value
        return function(context, items, *args, **kwargs)

    return counting


def _counting_square(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts the squares of the lengths of its texts."""

    @wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, (str, *_CONTAINERS)):
                _count_iterations(len(str(value)) ** 2 // SQUARED)
        return function(*args, **kwargs)

    return counting


def _count_method(owner: Any, name: str, args: Sequence[Any]) -> None:
    """Count the length of what a method of a text returns, and the nodes that a method of a list compares."""
    if isinstance(owner, list | tuple):
        _count_nested(owner)
    elif name == "replace" and len(args) > 1:
        _count_length(len(owner) + owner.count(args[0]) * len(args[1]))
    elif name == "join" and args:
        _count_length(sum(map(_length, args[0])) + len(owner) * len(args[0]))
    elif name in ("expandtabs", "translate"):
        raise TemplateLimitError(f"the method {name} is not supported")


def _format_by_method(format: Callable[..., str], text: str, *args: Any, **kwargs: Any) -> str:
    """Apply the method `format` of `text`."""
    _count_fields(text, "{", (*args, *kwargs.values()))
    return format(*args, **kwargs)


def _count_fields(text: Any, sign: str, values: Iterable[Any]) -> None:
    """Count the maximum length of a text whose fields, each with a `sign`, are filled with `values`."""
    if isinstance(text, str):
        _count_nested(values)
        longest = max((len(str(value)) for value in values), default=0)
        _count_length(len(text) + text.count(sign) * longest)


@pass_eval_context
def _replace(context: nodes.EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    """Jinja's filter `replace`, which counts the length of its result."""
    _count_nested((s, old, new))
    _count_length(len(str(s)) + str(s).count(str(old)) * len(str(new)))
    return do_replace(context, s, old, new, count)


@pass_environment
def _sum(
    environment: Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    """Jinja's filter `sum`, which counts the lengths of sums of lists."""
    items = iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable)
    total = start
    for item in items:
        _count_length(_length(total) + _length(item))
        if isinstance(total, list) and isinstance(item, list) and total is not start:
            total += item  # a list of this function: a new one for each item would take most of the time
        else:
            total = total + item
    return total


def _join_texts(values: list[Any]) -> str:
    _count_nested(values)
    texts = [str(value) for value in values]
    _count_length(sum(map(len, texts)))
    return "".join(texts)


@pass_eval_context
def _join(
    context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    """Jinja's filter `join`, which counts the length of its result."""
    items = list(value if attribute is None else map(make_attrgetter(context.environment, attribute), value))
    _count_nested(items)
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
    _count_fields(value, "%", (*args, *kwargs.values()))
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
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _times(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0
