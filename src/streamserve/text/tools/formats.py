"""How families of models write tool calls, and which of them a chat template speaks.

hermes       <tool_call>{"name": …, "arguments": {…}}</tool_call>            (Hermes, Qwen)
llama3_json  {"name": …, "parameters": {…}}; {…}                              (Llama 3)
mistral      [TOOL_CALLS][{"name": …, "arguments": {…}}, …]                   (Mistral)
             [TOOL_CALLS]name[ARGS]{…}                                        (its newer models)

A further family is one more entry in FORMATS.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """`opening` comes before a call and `closing` behind it; `around` are signs that may stand between calls,
    besides blanks. `bare`: a message may begin with a call without its opening. `named`: the name may stand
    before the arguments, followed by `separator` or not. Ids of calls have `id_length` letters and digits
    behind `id_prefix`.

    `calls` is what a grammar allows behind the first opening, as rules of Lark: {opening}, {closing},
    {separator} stand for these signs, @call for a call as a JSON object with its arguments under `key`, and
    `name_first` for a name with its arguments behind it.
    """

    opening: str = ""
    closing: str = ""
    around: str = ""
    bare: bool = False
    named: bool = False
    separator: str = ""
    id_prefix: str = "call_"
    id_length: int = 24
    key: str = "arguments"
    calls: str = ""


FORMATS = {
    "hermes": Format(
        opening="<tool_call>",
        closing="</tool_call>",
        calls="one (BLANKS {opening} one)* BLANKS\none: BLANKS @call BLANKS {closing}",
    ),
    "llama3_json": Format(
        opening="<|python_tag|>",
        around=";",
        bare=True,
        key="parameters",
        calls='BLANKS @call (BLANKS ";" BLANKS @call)* BLANKS',
    ),
    "mistral": Format(
        opening="[TOOL_CALLS]",
        around="[],",
        named=True,
        separator="[ARGS]",
        id_prefix="",
        id_length=9,
        calls="one (BLANKS {opening} one)* BLANKS\none: BLANKS (list | name_first)\n"
        'list: "[" BLANKS @call (BLANKS "," BLANKS @call)* BLANKS "]"',
    ),
}

REQUIRED = Format(around="[],", bare=True)
"""What a grammar makes of a call that must come: a JSON list of calls, and nothing else."""

NAMES = ("auto", "none", *FORMATS)


def find_format(name: str, template: str | None) -> Format | None:
    """The format called `name`; with "auto" the one that `template` writes itself. None for "none", and where
    nothing is found."""
    if name != "auto":
        return FORMATS.get(name)
    if not template or not renders_tools(template):
        return None
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<|start_header_id|>" in template or "<|python_tag|>" in template:
        return FORMATS["llama3_json"]
    return None


def renders_tools(template: str | None) -> bool:
    """Whether a chat template tells the model which tools there are."""
    return template is not None and "tools" in template
