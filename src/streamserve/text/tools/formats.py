"""Tool call formats of model families, and detection of a chat template's format.

hermes         <tool_call>{"name": …, "arguments": {…}}</tool_call>        (Hermes, Qwen, SmolLM3, Granite 4)
llama3_json    {"name": …, "parameters": {…}}; {…}                         (Llama 3)
mistral        [TOOL_CALLS][{"name": …, "arguments": {…}}, …]              (Mistral)
               [TOOL_CALLS]name[ARGS]{…}                                   (its newer models)
granite        <|tool_call|>[{"name": …, "arguments": {…}}, …]             (Granite 3)
phi4_mini      <|tool_call|>[…]<|/tool_call|> or functools[…]              (Phi-4-mini)
qwen3_coder    <tool_call><function=…><parameter=…>…</parameter></function></tool_call>
pythonic       [name(city="Rome"), …]                                      (Llama 3.2, Llama 4)
gemma          like pythonic, or JSON objects, also in code blocks         (Gemma 3)
functiongemma  <start_function_call>call:name{city:<escape>Rome<escape>}<end_function_call>
olmo3          <function_calls>name(city="Rome") …</function_calls>
harmony        <|channel|>commentary to=functions.name<|message|>{…}       (gpt-oss: harmony.py)

To add another family, add its format to FORMATS, and strings of its template to _SIGNS.
"""

from dataclasses import dataclass

from streamserve.text.tools.calls import Syntax


class NotExpressible(ValueError):
    """A schema or a grammar cannot be followed in the syntax of a call."""


@dataclass(frozen=True)
class Format:
    """A tool call format.

    `openings` and `closings` are markers that may come before and after a call; `around` are characters
    allowed between calls, besides whitespace. `bare`: a message may begin with a call without its opening, if
    the call begins with one of these characters. `heads` are texts with which a call without an opening
    begins, anywhere in a message. Calls have one of the `syntaxes`. `separator` is the marker that may follow
    a call's name. The id of a call is `id_prefix` and `id_length` letters and digits.

    `forced`: a grammar forces calls, so all text is part of them. If the text is cut short, the part that
    cannot be returned as a call is dropped; it was never meant as content.

    `calls` are the Lark rules of a grammar for the text after the first opening. In them, {opening},
    {closing} and {separator} stand for these markers, @call for a call as a JSON object with its arguments
    under `key`, `name_first` for a name followed by its arguments, and `native` for a call in another syntax.
    Without `calls`, a grammar cannot constrain calls in this format. `others` are further markers.
    """

    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    around: str = ""
    bare: str = ""
    heads: tuple[str, ...] = ()
    syntaxes: tuple[Syntax, ...] = ("json",)
    forced: bool = False
    separator: str = ""
    id_prefix: str = "call_"
    id_length: int = 24
    key: str = "arguments"
    calls: str = ""
    others: tuple[str, ...] = ()

    @property
    def around_calls(self) -> tuple[str, ...]:
        """The markers that are outside of calls."""
        return (*self.openings, *self.closings, *self.heads)

    @property
    def strays(self) -> tuple[str, ...]:
        """The markers that have no other meaning than the end of a call, wherever they are."""
        return tuple(mark for mark in self.closings if not mark.startswith(_FENCE))

    @property
    def marks(self) -> tuple[str, ...]:
        """All markers, which the parser needs to see even if they are special tokens."""
        marks = (*self.openings, *self.closings, self.separator, *self.others)
        return tuple(mark for mark in marks if mark)


_FENCE = "```"
_BLOCKS = "block (BLANKS {opening} block)* BLANKS\nblock: BLANKS "
_LIST = 'BLANKS "[" BLANKS @call (BLANKS "," BLANKS @call)* BLANKS "]" BLANKS'

FORMATS = {
    "hermes": Format(
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        calls=_BLOCKS + "@call BLANKS {closing}",
    ),
    "llama3_json": Format(
        openings=("<|python_tag|>",),
        around=";,",
        bare="{",
        key="parameters",
        calls='BLANKS @call (BLANKS ";" BLANKS @call)* BLANKS',
    ),
    "mistral": Format(
        openings=("[TOOL_CALLS]",),
        around="[],",
        syntaxes=("json", "named"),
        separator="[ARGS]",
        others=("[CALL_ID]",),
        id_prefix="",
        id_length=9,
        calls=_BLOCKS + f"(list | name_first)\nlist: {_LIST}",
    ),
    "granite": Format(
        openings=("<|tool_call|>", "<tool_call>"),
        closings=("</tool_call>",),
        around="[],",
        calls=_LIST,
    ),
    "phi4_mini": Format(
        openings=("<|tool_call|>", "functools"),
        closings=("<|/tool_call|>",),
        around="[],",
        calls=f"{_LIST} {{closing}}?",
    ),
    "qwen3_coder": Format(
        openings=("<tool_call>",),
        closings=("</tool_call>", "</function>", "</parameter>"),
        heads=("<function=",),
        syntaxes=("xml",),
        calls=_BLOCKS + "native BLANKS {closing}",
    ),
    "pythonic": Format(
        openings=("<|python_tag|>", "<|python_start|>"),
        closings=("<|python_end|>",),
        around="[],",
        bare="[",
        syntaxes=("python",),
        calls='BLANKS "[" BLANKS native (BLANKS "," BLANKS native)* BLANKS "]" BLANKS',
    ),
    "gemma": Format(
        openings=("```tool_code", "```tool_call", "```json"),
        closings=(_FENCE,),
        around="[],",
        bare="[{",
        syntaxes=("json", "python"),
        key="parameters",
        calls='BLANKS "[" BLANKS native (BLANKS "," BLANKS native)* BLANKS "]" BLANKS {closing}?',
    ),
    "functiongemma": Format(
        openings=("<start_function_call>",),
        closings=("<end_function_call>",),
        syntaxes=("gemma",),
        others=("<escape>",),
    ),
    "olmo3": Format(
        openings=("<function_calls>",),
        closings=("</function_calls>",),
        syntaxes=("python",),
        calls="BLANKS native (BLANKS native)* BLANKS {closing} BLANKS",
    ),
    "harmony": Format(
        others=(
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        )
    ),
}

REQUIRED = Format(around="[],", bare="[{", forced=True)
"""The format that a grammar produces for required calls: a JSON list of calls, and no other text."""

_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), "harmony"),
    (("<function=",), "qwen3_coder"),
    (("<start_function_call>",), "functiongemma"),
    (("<function_calls>",), "olmo3"),
    (("<|start_of_role|>", "<|tool_call|>"), "granite"),
    (("<|tool|>",), "phi4_mini"),
    (("functools[",), "phi4_mini"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>",), "hermes"),
    (("<start_of_turn>",), "gemma"),
    (("[func_name1(",), "pythonic"),
    (("<|python_start|>",), "pythonic"),
    (("<|start_header_id|>",), "llama3_json"),
    (("<|python_tag|>",), "llama3_json"),
)
"""Strings in a chat template that renders tools, and the format that they show: the first format whose
strings are all in the template."""


def find_format(name: str, template: str | None) -> Format | None:
    """Return the format called `name`; for "auto" the format that `template` uses.

    None for "none", and if no format is detected.
    """
    if name != "auto":
        return FORMATS.get(name)
    if not template or not renders_tools(template):
        return None
    found = (format for signs, format in _SIGNS if all(sign in template for sign in signs))
    return FORMATS.get(next(found, ""))


def renders_tools(template: str | None) -> bool:
    """Return whether a chat template renders the list of tools."""
    return template is not None and "tools" in template
