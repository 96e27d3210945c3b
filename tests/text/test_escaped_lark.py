"""A grammar of JSON escapes allows the inside of a JSON string if and only if the grammar that it was made of
allows the string's text."""

import json
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from streamserve.protocol.grammar import MAX_GRAMMAR_BYTES, Grammar, to_llguidance
from streamserve.text.escaped_lark import escaped_lark, repeats_line_breaks
from streamserve.text.lark import NotReadable, lark_tokens
from tests.text import patch_grammar

BYTES = LLTokenizer("byte")


def allows(lark: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, to_llguidance(Grammar(kind="lark", text=lark)), log_level=0)
    assert not matcher.is_error(), (lark, matcher.get_error())
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    patch_grammar.LARK: (patch_grammar.GOOD, patch_grammar.BAD),
    r"start: /(.|\n)*/": (("", 'a\n"\\\x01\x7f\u2028é'), ()),
    r'start: /[^"]*"\d+(?s:.)x/': (('a\n"1\nx', '\\"22"x'), ('"a"1x', '"1\nX')),
    r'start: /.*x/ "\n"': (("a\tx\n", '"xx"x\n'), ("a\nx\n", "x", "x\\n")),
    "start: LINE+\nLINE: /[^\\n]*/ LF\n%import common.LF": (('a\tx\n\n"\n',), ("a", "", "\\n")),
    'start: A+\nA: "\\t".."a" | LAST\nLAST: "\\x7f" | /\\x{e9}/': (('\n"\\a', "\x7fé"), ("b", "\b")),
    'start: "A\\n"i /b"/i': (('a\nB"', 'A\nb"'), ('a\\nb"', "a\n")),
    'start: INT ("+" INT)*\n%import common (INT, WS)\n%ignore WS': (("1", "1 \n + \t22"), ('1"+2', "1 2")),
    "start: N+\n%import common.NEWLINE -> N": (("\n", "\r\n\n"), ("", "\r", "\\n")),
    r'start: /("(a|\\.){1,2}",?\n)+/': (('"a\\""\n"\\n",\n',), ('""\n', '"a\n')),
    'start: /^a"?$/ ("b" ~ 2..3)': (("abb", 'a"bbb'), ("ab", 'a"')),
    'start: (A | B)*  # the letters\nA: /[a-c]+/\nB: /[\\s"\\]-]/': (('abc "]-\n',), ("d", "\\")),
    r'start: (WORD | "say \"hi\"" | /no./) "\n"' + "\nWORD: /[a-z ]+/": (
        ("say \n", 'say "hi"\n', "no\n", 'no"\n'),
        ('say "\n', "\n"),
    ),
    r'start: ("a" | "A\""i | /a\\/) /["\t]/': (("a\t", 'a""', "a\\\t", 'A"\t'), ("a\n", 'A"\n')),
    r'start: /[^"x]*/? "x" (/"b*/ ~ 2) /c\t/+': (('a\nx""c\t', 'x"bb"bc\tc\t'), ('x"bc\t', "xc\t")),
    'start: "a\\"b" "\\"i"i\n%ignore / /\n': (('a"b "I', 'a"b"i'), ('a "b"i', 'a"b" i')),
    'start: "a" "b"\n%ignore "\\r\\n"': (("a\r\nb", "ab"), ("a\nb", "a\rb")),
    r"start: S" + "\n%import common.ESCAPED_STRING -> S": (('"a\\"b"', '""', '"\n"'), ('"a', "a")),
}


@pytest.mark.parametrize("lark", CASES, ids=range(len(CASES)))
def test_the_inside_of_a_json_string_follows_the_grammar(lark: str) -> None:
    escaped = escaped_lark(lark)
    good, bad = CASES[lark]
    for text in good:
        assert allows(lark, text), text
        assert allows(escaped, inside(text)), text
        assert not any(allows(escaped, inside(text) + end) for end in ('"', "\n")), "it ends the string"
    for text in bad:
        assert not allows(lark, text), text
        assert not allows(escaped, inside(text)), text


ATOMS = ("a", ".", r"\n", r"\"", '"', r"\\", "[^a]", r"[\n\"]", r"\s", r"\w", r"[a-z\t]", r"\x09", r"\u{22}")
REPEATS = st.sampled_from(["*", "+", "?", "{1,2}"])
PATTERNS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,2}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=5,
)
TEXTS = st.lists(st.text('a"\\\n\tz', max_size=6), min_size=1, max_size=8)


@given(PATTERNS, TEXTS)
def test_every_regular_expression_allows_the_escapes_of_its_texts(pattern: str, texts: list[str]) -> None:
    lark = f"start: /{pattern}/"
    escaped = escaped_lark(lark)
    for text in texts:
        assert allows(escaped, inside(text)) == allows(lark, text), (pattern, text)


@pytest.mark.parametrize(
    "lark",
    [
        'start: A\nA: /a/ & ~"b"',
        "start: A\nA: /a/ & /b/",
        "start: /\\p{L}/",
        "start: /[\\p{L}]/",
        "start: /[[:alpha:]]/",
        "start: /[a-z&&[^b]]/",
        'start: /(?x: ")/',
        'start: /"/x',
        'start: /a(?i:b"*)/',
        "start: /(\\n|a)*?b/",
        'start[lazy]: /a*/ "b"',
        'start: %regex {"substring_chars": "ab"}',
        "start: A\n%import my.A",
        'start: "a"\n%ignore /a"b/',
        'start: /\\bab"/',
        "start: /[a/",
        'start: "a',
        "start: /a",
    ],
)
def test_what_has_no_form_in_json_is_named(lark: str) -> None:
    with pytest.raises(NotReadable):
        escaped_lark(lark)


@given(st.text('aA:"/\\%<>@[]{}~.|# \n+*', max_size=30))
def test_the_tokens_are_the_whole_grammar(text: str) -> None:
    assert "".join(token.text for token in lark_tokens(text)) == text


@pytest.mark.parametrize(
    ("lark", "repeats"),
    [
        (patch_grammar.LARK, False),
        (r"start: /(.|\n)*/", True),
        (r"start: /[^a]+/", True),
        (r"start: (/a+\n/)*", False),
        (r"start: /(a\n?)+/", True),
        ("start: LINES\nLINES: LINE+\nLINE: /.*/ LF\nLF: \"\\n\"", True),
        ("start: LINE+\nLINE: /.*/ LF\n%import common.LF", False),
        ("start: A\nA: B B | B\n  | C\nB: \"b\"\nC: /\\n*/", True),
        ("start: WS\n%import common.WS", True),
        ("start: \"a\" \"b\"\n%import common.WS\n%ignore WS", False),
        ("start: A\nA: ~\"a\"", True),
    ],
)  # fmt: skip
def test_terminals_that_may_match_several_line_breaks(lark: str, repeats: bool) -> None:
    assert repeats_line_breaks(lark) is repeats


def test_terminals_that_consist_of_each_other_take_a_limited_time() -> None:
    """Each terminal consists of the next one, twice; the last ones consist of each other."""
    lines = [f"A{number}: A{number + 1} A{number + 1}" for number in range(200)]
    lark = "\n".join(["start: A0", *lines, "A200: A199 /\\n/"])
    assert not repeats_line_breaks(lark)
    assert repeats_line_breaks(lark + "+")
    assert escaped_lark(lark).count("terminal-a") > 400


TERMINALS = "\n".join(f'A{number}: A{number + 1}+ "{"x" * 200}"' for number in range(240))
SLOW = {
    "a string that does not end": "start: " + r"\"" * 32000,
    "a regular expression that does not end": "start: " + r"\/" * 32000,
    "sets that do not end": "start: /" + "[" * 2000 + "a" * 60000 + "/",
    "anchors": "start: /" + "^" * 60000 + '"/',
    "a long terminal that is often ignored": f'start: "a"\nA: /[^{"b" * 30000}]+/\n' + "%ignore A\n" * 3000,
    "a terminal of anchors that is often ignored": (
        f'start: "a"\nA: /{"^" * 30000}b+/\n' + "%ignore A\n" * 3000
    ),
    "terminals that consist of others": f'start: A0\n{TERMINALS}\nA240: "x"',
}


@pytest.mark.parametrize("lark", SLOW.values(), ids=SLOW)
def test_a_grammar_of_the_largest_size_is_read_in_a_limited_time(lark: str) -> None:
    """Before it is known whether the library accepts a grammar."""
    assert len(lark) <= MAX_GRAMMAR_BYTES
    began = time.thread_time()
    assert "".join(token.text for token in lark_tokens(lark)) == lark
    with suppress(NotReadable):
        escaped_lark(lark)
    repeats_line_breaks(lark)
    assert time.thread_time() - began < 5
