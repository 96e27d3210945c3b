r"""The grammar of a grammar's texts as the inside of a JSON string.

Models write the input of a custom tool in a JSON string: a line break is \n there, and a quote is \". So each
string and each regular expression is replaced by one that matches the escaped text, in the spelling that JSON
writers use. No text of the result contains a quote that could end the string.

The parser reads the longest text that a string or a regular expression matches, and does not go back: where
one could end before an escape that begins like one of its own, it must be able to end. So regular expressions
with escapes and repetitions become rules over characters, and so do terminals, which may consist of them.
Where another one could end in the middle of a string or regular expression, each escape must begin a new part
of a sequence. If the grammar ignores some text, this could be between the parts: then they stay together.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from streamserve.protocol.grammar import MAX_GRAMMAR_BYTES
from streamserve.text.lark import (
    ESCAPED,
    Atom,
    LarkToken,
    NotReadable,
    Operator,
    lark_tokens,
    literal_text,
    range_ends,
    regex_literal,
    regex_parts,
)

COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Lark's common terminals that match characters which JSON escapes. Other common terminals stay imports."""

_IMPORT = re.compile(r"(?m)^[ \t]*%[ ]*import\b([^\n#]*)")
_ONE = re.compile(r"common\.([A-Z_]+)(?:\s*->\s*([A-Z_]+))?")
_SEVERAL = re.compile(r"common\s*\(([A-Z_,\s]+)\)")
_TERMINAL = re.compile(r"(?m)^[ \t]*(_?[A-Z][_A-Z0-9-]*)[ \t]*:([^\n]*(?:\n[ \t]*\|[^\n]*)*)")
_IGNORE = re.compile(r"(?m)^[ \t]*%[ ]*ignore\b[^\n]*")
_ATTRIBUTES = re.compile(r"(?m)^[ \t]*[!?]*[a-z_][a-z0-9_-]*[ \t]*(?:\[|::|\{)")
_BEFORE_ESCAPED = re.compile(r'(?<=.)(?=["\\\x00-\x1f])', re.DOTALL)
_PLAIN = r'[^"\\\x00-\x1f]'
_SHORT = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", '"': '"', "\\": r"\\"}

Part = Atom | Operator


def escaped_lark(grammar: str) -> str:
    """Return the grammar in Lark of the texts of `grammar` as the inside of a JSON string.

    Raises NotReadable if it uses something of Lark that has no such form here, or if the result is too large.
    """
    grammar = with_definitions(grammar)
    if _ATTRIBUTES.search(grammar):
        raise NotReadable("attributes and parameters of rules")
    terminals = dict(_TERMINAL.findall(grammar))
    apart = not _IGNORE.search(grammar)
    known: dict[tuple[LarkToken, bool], str] = {}  # a long terminal may be ignored thousands of times
    written, size, ignoring = list[str](), 0, False
    for token in lark_tokens(grammar):
        if token.kind == "directive":
            ignoring = token.text[1:].strip() == "ignore"
        elif token.kind == "line":
            ignoring = False
        if (token, ignoring) not in known:
            known[token, ignoring] = (
                _ignored(token, terminals) if ignoring else _escaped(token, terminals, apart)
            )
        written.append(known[token, ignoring])
        size += len(written[-1])
        if size > MAX_GRAMMAR_BYTES:
            raise NotReadable(f"in a JSON string, at most {MAX_GRAMMAR_BYTES} characters are possible")
    return "".join(written)


def with_definitions(grammar: str) -> str:
    """Return `grammar` with definitions in place of imports of `COMMON`. Raises NotReadable for another
    form of import."""
    return _IMPORT.sub(_definitions, grammar)


def _definitions(statement: re.Match[str]) -> str:
    path = statement[1].strip()
    one, several = _ONE.fullmatch(path), _SEVERAL.fullmatch(path)
    if one:
        names = {one[2] or one[1]: one[1]}
    elif several:
        names = {name.strip(): name.strip() for name in several[1].split(",")}
    else:
        raise NotReadable(f"the import {path}")
    lines = []
    for name, common in names.items():
        imported = f"%import common.{common}" + ("" if name == common else f" -> {name}")
        lines.append(f"{name}: /{COMMON[common]}/" if common in COMMON else imported)
    return "\n".join(lines)


def _escaped(token: LarkToken, terminals: Mapping[str, str], apart: bool) -> str:
    """Return a token of a rule or a terminal as a part of a rule. `apart`: each escape begins a new part."""
    if token.kind == "name" and token.text in terminals:
        return f"terminal-{token.text.lower()}"
    if token.kind == "string":
        return _escaped_string(token.text, apart)
    if token.kind == "range":
        return f"/{one_of(_range(token.text))}/"
    if token.kind == "regex":
        return escaped_regex(*regex_literal(token.text), apart)
    if token.kind == "unclosed":
        raise NotReadable("a string or regular expression that does not end")
    if token.kind == "directive" and token.text[1:].strip() not in ("ignore", "import"):
        raise NotReadable(f"the directive {token.text}")
    if token.text in ("~", "&"):
        raise NotReadable(f"the operator {token.text}")
    return token.text


def _ignored(token: LarkToken, terminals: Mapping[str, str]) -> str:
    """Return a token of what the grammar ignores. The parser ignores any number of it, so one character of a
    repetition suffices."""
    text = terminals.get(token.text, token.text).strip() if token.kind == "name" else token.text
    if token.kind in ("directive", "string", "comment") or not text.strip():
        return _escaped(token, {}, apart=False)
    if not (text.startswith("/") and text.rstrip("imslux").endswith("/")):
        raise NotReadable(f"the ignored {text}")
    parts = _unwrapped(list(regex_parts(*regex_literal(text))))
    if (
        not parts
        or not isinstance(parts[0], Atom)
        or [part.text for part in parts[1:]] not in ([], ["+"], ["*"])
    ):
        raise NotReadable(f"the ignored {text}")
    return f"/{one_of(parts[0])}/"


def _escaped_string(token: str, apart: bool) -> str:
    text, case = literal_text(token), "i" if token.endswith("i") else ""
    if case and not ESCAPED.isdisjoint(text):
        pattern = "".join(sign if sign.isalnum() else rf"\x{{{ord(sign):x}}}" for sign in text)
        return escaped_regex(pattern, case, apart)
    parts = _BEFORE_ESCAPED.split(text) if apart else [text]
    return _sequence([json.dumps(_inside(part)) + case for part in parts])


def _inside(text: str) -> str:
    """Return a text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _sequence(parts: list[str]) -> str:
    """Return a sequence as one part of a rule."""
    return parts[0] if len(parts) == 1 else f"({' '.join(parts)})"


def _range(token: str) -> Atom:
    first, last = range_ends(token)
    inside = frozenset(sign for sign in ESCAPED if first <= sign <= last)
    return Atom(rf"[\x{{{ord(first):x}}}-\x{{{ord(last):x}}}]", inside)


def escaped_regex(pattern: str, flags: str = "", apart: bool = True) -> str:
    """Return a part of a Lark rule that matches the texts of a regular expression as the inside of a JSON
    string. `apart`: each escape begins a new part of the rule. Raises NotReadable if the characters of a part
    are not known."""
    parts = list(regex_parts(pattern, flags))
    if not any(isinstance(part, Atom) and part.escaped for part in parts):
        return f"/{pattern}/{flags}"
    case = "i" if "i" in flags else ""
    parts = _unwrapped(parts)
    if all(isinstance(part, Atom) for part in parts):
        return _sequence(_runs(parts, case, apart))
    if parts[-1].text in ("*", "+") and all(isinstance(part, Atom) for part in parts[:-1]):
        *before, repeated, operator = parts
        assert isinstance(repeated, Atom)
        return f"({' '.join([*_runs(before, case, apart), _repeated(repeated, operator.text, case)])})"
    return f"({' '.join(_rule_parts(parts, case))})"


def _unwrapped(parts: list[Part]) -> list[Part]:
    """Return the parts without anchors at their ends, and without a group around them all."""
    first, end = 0, len(parts)
    while first < end and parts[first].text == "^":
        first += 1
    while first < end and parts[end - 1].text == "$":
        end -= 1
    parts = parts[first:end]
    grouped = parts and parts[0].text in ("(", "(?:", "(?s:") and parts[-1].text == ")"
    if grouped and sum(isinstance(part, Operator) and part.kind == "open" for part in parts) == 1:
        return _unwrapped(parts[1:-1])
    return parts


def _runs(parts: Sequence[Part], case: str, apart: bool) -> list[str]:
    """Return a sequence of characters. With `apart`, each one that may be an escape begins a new part."""
    runs: list[str] = []
    for part in parts:
        assert isinstance(part, Atom)
        if not runs or (apart and part.escaped):
            runs.append("")
        runs[-1] += one_of(part)
    return [f"/{run}/{case}" for run in runs]


def _repeated(atom: Atom, operator: str, case: str) -> str:
    """Return the repetition of one character: runs of characters that are not escaped, and escapes."""
    if atom.single:
        return f"/{one_of(atom)}/{operator}"
    return f"(/{_plain(atom)}+/{case} | /{_escape(atom.escaped)}/){operator}"


def _rule_parts(parts: Sequence[Part], case: str) -> Iterator[str]:
    """Yield the parts of a regular expression as parts of a rule, in which each character is a terminal."""
    for index, part in enumerate(parts):
        if isinstance(part, Atom):
            yield f"/{one_of(part)}/{case}"
        elif part.kind == "open":
            if part.text.endswith(")") or "i" in part.text.partition("<")[0]:
                raise NotReadable(f"the flags {part.text}")
            yield "("
        elif part.text in ("^", "$") or (
            part.text == "?" and parts[index - 1].text[:1] in ("*", "+", "?", "{")
        ):
            raise NotReadable(f"{part.text} in a regular expression")
        else:
            yield part.text


def one_of(atom: Atom) -> str:
    """Return the pattern of the escapes of the characters that `atom` matches."""
    if not atom.escaped:
        return atom.text
    return _escape(atom.escaped) if atom.single else f"(?:{_plain(atom)}|{_escape(atom.escaped)})"


def _plain(atom: Atom) -> str:
    """Return the set of the characters that `atom` matches and that are not escaped."""
    return _PLAIN if atom.text == "." else f"[{atom.text}&&{_PLAIN}]"


@lru_cache(maxsize=64)
def _escape(signs: frozenset[str]) -> str:
    """Return the pattern of the escapes of characters that JSON escapes."""
    short = "".join(letter for sign, letter in _SHORT.items() if sign in signs)
    codes = "|".join(f"{ord(sign):04x}" for sign in sorted(signs - _SHORT.keys()))
    escapes = [f"[{short}]"] if short else []
    escapes += [f"u(?:{codes})"] if codes else []
    return rf"(?-i:\\(?:{'|'.join(escapes)}))"


def repeats_line_breaks(grammar: str) -> bool:
    """Return whether a terminal of `grammar`, except those that it ignores, may match several line breaks, or
    cannot be read.

    The parser reads the longest text that a terminal matches. So it would take a line break before a mark for
    a part of such a terminal.
    """
    try:
        grammar = with_definitions(grammar)
        terminals = {name: list(lark_tokens(text)) for name, text in _TERMINAL.findall(grammar)}
        rules = list(lark_tokens(_IGNORE.sub("", _TERMINAL.sub("", grammar))))
        parts = {name: {token.text for token in tokens} for name, tokens in terminals.items()}
        used = _reachable((token.text for token in rules), parts)
        breaking = {name for name in used if any(map(_has_line_break, terminals[name]))}
        breaking = _reachable(breaking, _inverted(parts))
        return any(map(_repeats_in_token, rules)) or any(
            _repeats(terminals[name], name in breaking) for name in used
        )
    except NotReadable:
        return True


def _reachable(names: Iterable[str], parts: Mapping[str, Iterable[str]]) -> set[str]:
    """Return the terminals among `names`, and those that they consist of. `parts` has the names in each
    terminal."""
    found: set[str] = set()
    left = [name for name in names if name in parts]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [part for part in parts[name] if part in parts]
    return found


def _inverted(parts: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Return the terminals that consist of each terminal."""
    users: dict[str, set[str]] = {name: set() for name in parts}
    for name, names in parts.items():
        for part in users.keys() & set(names):
            users[part].add(name)
    return users


def _repeats(tokens: Sequence[LarkToken], breaking: bool) -> bool:
    """Return whether a terminal may match several line breaks: by itself, not in the terminals that it
    consists of. `breaking`: it, or one of these, may match a line break."""
    if any(token.text == "~" for token in tokens):
        raise NotReadable("the operator ~")
    if any(map(_repeats_in_token, tokens)):
        return True
    return breaking and any(token.kind == "repeat" for token in tokens)


def _has_line_break(token: LarkToken) -> bool:
    """Return whether a literal may match a line break."""
    if token.kind == "string":
        return "\n" in literal_text(token.text)
    if token.kind == "range":
        return "\n" in _range(token.text).escaped
    parts = regex_parts(*regex_literal(token.text)) if token.kind == "regex" else ()
    return any(isinstance(part, Atom) and "\n" in part.escaped for part in parts)


def _repeats_in_token(token: LarkToken) -> bool:
    """Return whether a regular expression repeats a part that matches a line break."""
    if token.kind != "regex":
        return False
    groups, last = [False], False  # whether a line break is in each open group, and in the last part
    for part in regex_parts(*regex_literal(token.text)):
        if isinstance(part, Atom):
            last = "\n" in part.escaped
        elif part.kind == "open" and not part.text.endswith(")"):
            groups.append(False)
            last = False
        elif part.kind == "close" and len(groups) > 1:
            last = groups.pop()
        elif part.kind == "repeat" and last:
            return True
        groups[-1] = groups[-1] or last
    return False
