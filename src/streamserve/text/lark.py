"""Reads grammars in Lark, in llguidance's dialect: their tokens, and the characters of their patterns.

Only characters matter that a JSON string has to escape: double quotes, backslashes and control characters.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

ESCAPED = frozenset('"\\') | {chr(code) for code in range(32)}
"""The characters that a JSON string has to escape."""

Kind = Literal[
    "comment", "range", "string", "regex", "unclosed", "token", "reference", "directive", "name", "repeat",
    "line", "sign",
]  # fmt: skip

_TOKEN = re.compile(
    r"""
    (?P<comment>(?:\#|//)[^\n]*)
  | (?P<range>"(?:\\.|[^"\\])*"[ \t]*\.\.[ \t]*"(?:\\.|[^"\\])*")
  | (?P<string>"(?:\\.|[^"\\])*"i?)
  | (?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
  | (?P<unclosed>["/].+)
  | (?P<token><[^<>\s]+>)
  | (?P<reference>@[A-Za-z0-9_-]+)
  | (?P<directive>%[ ]*[a-z]+)
  | (?P<name>[!?]?[A-Za-z_][A-Za-z0-9_-]*)
  | (?P<repeat>[+*]|~[ \t]*[0-9]+(?:\.\.[0-9]+)?|\{[0-9,\ ]+\})
  | (?P<line>[ \t]*(?:\r?\n)+)
  | (?P<sign>->|[ \t]+|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_PART = re.compile(
    r"""
    (?P<escape>\\(?:[xuU]\{[0-9A-Fa-f]+\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.))
  | (?P<open>\((?:\?P?<\w+>|\?[A-Za-z-]*[:)])?)
  | (?P<close>\))
  | (?P<repeat>[*+]|\{[0-9,\ ]+\})
  | (?P<sign>[|?^$])
  | (?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])
  | (?P<unclosed>\[)
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_NUMBER = re.compile(r"\\[xuU]\{?([0-9A-Fa-f]+)\}?")
_NAMED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_CLASSES = {
    name: frozenset(sign for sign in ESCAPED if re.match(rf"\{name}", sign, re.ASCII)) for name in "dDwWsS"
}
_NESTED = re.compile(r"(?:\\.|[^\\\[])*(?:\[|&&|--|~~)", re.DOTALL)
_FLAGS = re.compile(r"[im]*s?[im]*")


class NotReadable(ValueError):
    """A pattern whose characters are not known here."""


@dataclass(frozen=True, slots=True)
class LarkToken:
    """A token of a grammar in Lark. Spaces and line breaks are tokens, too. A string or a regular expression
    that does not end is one `unclosed` token with all that follows."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Atom:
    """A part of a pattern that matches one character: `escaped` are the characters of `ESCAPED` that it
    matches. `single`: it matches no other character than this one."""

    text: str
    escaped: frozenset[str] = frozenset()
    single: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """A part of a pattern that matches no character by itself."""

    kind: Literal["open", "close", "repeat", "sign"]
    text: str


def lark_tokens(grammar: str) -> Iterator[LarkToken]:
    """Yield the tokens of a grammar. Their texts together are the grammar."""
    for match in _TOKEN.finditer(grammar):
        yield LarkToken(match.lastgroup, match[0])  # type: ignore[arg-type]


def literal_text(token: str) -> str:
    """Return the text of a string literal. Raises NotReadable for an invalid escape."""
    inner = re.sub(r"\\(?:x([0-9A-Fa-f]{2})|(.))", _json_escape, token.removesuffix("i"), flags=re.DOTALL)
    try:
        text: str = json.loads(inner)
    except ValueError as error:
        raise NotReadable(f"{token} is not a string") from error
    return text


def _json_escape(match: re.Match[str]) -> str:
    return rf"\u00{match[1]}" if match[1] else match[0]


def range_ends(token: str) -> tuple[str, str]:
    """Return the first and the last character of a range like "a".."z". Raises NotReadable for other
    texts."""
    first, last = (
        literal_text(end.strip()) for end in re.split(r"(?<=\")[ \t]*\.\.[ \t]*(?=\")", token, maxsplit=1)
    )
    if len(first) != 1 or len(last) != 1:
        raise NotReadable(f"the range {token}")
    return first, last


def regex_literal(token: str) -> tuple[str, str]:
    """Return the pattern and the flags of a regular expression between slashes."""
    end = token.rindex("/")
    return token[1:end], token[end + 1 :]


def regex_parts(pattern: str, flags: str = "") -> Iterator[Atom | Operator]:
    """Yield the parts of a regular expression. Their texts together are the pattern.

    Raises NotReadable for flags, escapes and sets whose meaning is not known here.
    """
    if not _FLAGS.fullmatch(flags):
        raise NotReadable(f"flags {flags} of a regular expression")
    scopes = ["s" in flags]  # whether the dot matches line breaks, in each open group
    for match in _PART.finditer(pattern):
        kind, text = match.lastgroup, match[0]
        if kind == "open":
            dots = _dots_match_breaks(text, scopes[-1])
            if text.endswith(")"):
                scopes[-1] = dots
            else:
                scopes.append(dots)
        elif kind == "close" and len(scopes) > 1:
            scopes.pop()
        if kind in ("open", "close", "repeat", "sign"):
            yield Operator(kind, text)  # type: ignore[arg-type]
        elif kind == "unclosed":
            raise NotReadable("a set that does not end")
        elif kind == "escape":
            yield _escape(text)
        elif kind == "set":
            yield Atom(text, _members(text))
        elif text == ".":
            yield Atom(text, ESCAPED if scopes[-1] else ESCAPED - {"\n"})
        else:
            yield Atom(text, ESCAPED & {text}, single=True)


def _dots_match_breaks(opening: str, outer: bool) -> bool:
    """Return whether the dot matches line breaks in a group, or after flags."""
    if not opening.startswith("(?") or "<" in opening:
        return outer
    on, _, off = opening[2:-1].partition("-")
    if not (_FLAGS.fullmatch(on) and _FLAGS.fullmatch(off)):
        raise NotReadable(f"the flags {opening}")
    return "s" in on or (outer and "s" not in off)


def _escape(text: str) -> Atom:
    number, name = _NUMBER.fullmatch(text), text[1:]
    if name in _CLASSES:
        return Atom(text, _CLASSES[name])
    if number is None and name.isalnum() and name not in _NAMED:
        raise NotReadable(f"the escape {text}")
    sign = chr(min(int(number[1], 16), 0x10FFFF)) if number else _NAMED.get(name, name)
    return Atom(text, ESCAPED & {sign}, single=True)


def _members(text: str) -> frozenset[str]:
    """Return the characters of `ESCAPED` in a set like [^a-z]."""
    inside = text[1:-1]
    if _NESTED.match(inside) or re.search(r"\\(?:[pPbBAzZUuQEkKXRNHV]|x\{)", inside):
        raise NotReadable(f"the set {text}")
    try:
        found = re.compile(text, re.ASCII)
    except re.error as error:
        raise NotReadable(f"the set {text}") from error
    return frozenset(sign for sign in ESCAPED if found.match(sign))
