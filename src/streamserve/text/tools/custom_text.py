"""Grammars of the input of custom tools, which is text, in the form in which calls write it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamserve.protocol.grammar import Grammar, check_grammar, in_slashes
from streamserve.text.escaped_lark import escaped_lark, repeats_line_breaks
from streamserve.text.tools.formats import NotExpressible

INPUT = "input"
"""The parameter of the function in place of a custom tool."""

BLANK = "BLANK"
"""The terminal of whitespace inside of JSON. The grammar that uses the rules below must define it."""


@dataclass(frozen=True)
class TextGrammar:
    """The grammar of a text, in Lark. If it was a regular expression, `pattern` is the expression."""

    lark: str
    pattern: str = ""


@dataclass(frozen=True)
class WrittenText:
    """The grammar of a text as calls write it: `value` is the part of a Lark rule for the parameter's value
    and its end. It refers to `rules`, and to the `grammars` by their names."""

    value: str
    rules: tuple[str, ...] = ()
    grammars: Mapping[str, str] = field(default_factory=dict)

    @property
    def json_object(self) -> str:
        """The part of a rule for the arguments as a JSON object."""
        return f'"{{" {BLANK} "\\"{INPUT}\\"" {BLANK} ":" {BLANK} {self.value} {BLANK} "}}"'


def regex_grammar(pattern: str) -> TextGrammar:
    """Return the grammar of the texts that match a regular expression as a whole."""
    anchored = pattern.removeprefix("^")
    before = anchored.removesuffix("$")
    if (len(before) - len(before.rstrip("\\"))) % 2 == 0:
        anchored = before
    pattern = f"(?:{in_slashes(anchored)})"
    return TextGrammar(f"start: /{pattern}/", pattern)


def in_json(name: str, grammar: TextGrammar) -> WrittenText:
    """Return the grammar of the text as a JSON string. `name` is unique among the texts of a request. Raises
    NotExpressible if the grammar has no such form."""
    try:
        escaped = escaped_lark(grammar.lark)
        check_grammar(Grammar(kind="lark", text=escaped))
    except ValueError as error:
        raise NotExpressible(str(error)) from error
    return WrittenText(f'"\\"" @{name} "\\""', grammars={name: escaped})


def in_tags(name: str, grammar: TextGrammar) -> WrittenText:
    """Return the grammar of the text before a closing tag, as `in_json` does.

    A text in Lark that may end where a line break follows could continue with the tag. So it must not have
    terminals of several line breaks. If the grammar ignores some text, it may ignore the line break before
    the tag, too.
    """
    if grammar.pattern:
        rule = f'{name}[lazy]: /{grammar.pattern}/ "\\n</parameter>\\n"'
        return WrittenText(name, (rule,))
    if repeats_line_breaks(grammar.lark):
        raise NotExpressible("a terminal may match several line breaks")
    line = '"\\n"?' if "%ignore" in grammar.lark else '"\\n"'
    return WrittenText(f'@{name} {line} "</parameter>\\n"', grammars={name: grammar.lark})
