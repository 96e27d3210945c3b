"""Scoring a reply against its check: 1.0 is right, 0.0 is wrong, facts count in parts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .base import Check

_SECONDS = 5.0


def _answer(text: str, want: Any) -> float:
    found = re.search(r"answer: (-?\d+)\s*$", text)
    return float(found is not None and int(found[1]) == want)


def _number(text: str, want: Any) -> float:
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and int(numbers[-1]) == want)


def _facts(text: str, want: Sequence[str]) -> float:
    """The share of the facts that occur, each as whole words."""
    held = [re.search(rf"(?<!\w){re.escape(fact.lower())}(?!\w)", text.lower()) is not None for fact in want]
    return sum(held) / len(held)


def _json(text: str, want: Any) -> float:
    try:
        return float(json.loads(text) == want)
    except ValueError:
        return 0.0


def _keys(text: str, want: Mapping[str, str]) -> float:
    """An object with these keys, and values of these types."""
    try:
        found = json.loads(text)
    except ValueError:
        return 0.0
    return float(
        isinstance(found, dict) and {key: type(value).__name__ for key, value in found.items()} == want
    )


CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def _calls(text: str, want: Sequence[tuple[str, Any]]) -> float:
    """These calls (name, arguments), in this order, and nothing else."""
    try:
        found = [json.loads(call) for call in CALL.findall(text)]
    except ValueError:
        return 0.0
    wanted = [{"name": name, "arguments": arguments} for name, arguments in want]
    return float(found == wanted and not CALL.sub("", text).strip())


def _lines(text: str, want: tuple[int, Sequence[str]]) -> float:
    """As many members of a category as asked for, all different, with or without bullets and numbers."""
    count, members = want
    items = [re.sub(r"^\s*(-|\d+\.)\s*", "", item).strip() for item in re.split(r"[\n,]", text)]
    return float(len(items) == count == len(set(items)) and set(items) <= set(members))


def code_of(text: str) -> str:
    """The first fenced block of the text, or the empty string."""
    found = re.search(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    return found[1] if found else ""


def _python(text: str, want: Sequence[tuple[str, str]]) -> float:
    """The code gives every expected value; it runs in a process of its own, with a time limit."""
    tests = "\n".join(f"assert repr({call}) == {value!r}" for call, value in want)
    last = "_ = [f for f in list(globals().values()) if getattr(f, '__code__', None)][-1]"
    program = "\n".join(
        (code_of(text), last if any(call.startswith("_(") for call, _ in want) else "", tests)
    )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program], capture_output=True, timeout=_SECONDS, check=False
        )
    except (subprocess.TimeoutExpired, ValueError):  # a zero byte in the program is a ValueError
        return 0.0
    return float(done.returncode == 0)


def _any(text: str, want: Any) -> float:
    """A whole sentence."""
    return float(text.endswith((".", "!", "?")))


_SCORES: dict[str, Callable[[str, Any], float]] = {
    "exact": lambda text, want: float(text == want),
    "answer": _answer,
    "number": _number,
    "facts": _facts,
    "json": _json,
    "keys": _keys,
    "calls": _calls,
    "no_call": lambda text, want: float("<tool_call>" not in text and bool(text)),
    "lines": _lines,
    "python": _python,
    "any": _any,
}


def score(check: Check, text: str) -> float:
    """How right the text is, from 0.0 to 1.0."""
    return _SCORES[check.kind](text.strip(), check.want)
