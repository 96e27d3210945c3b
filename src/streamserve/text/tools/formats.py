"""Tool call formats of model families, and detection of a chat template's format.

hermes       <tool_call>{"name": …, "arguments": {…}}</tool_call>            (Hermes, Qwen)
llama3_json  {"name": …, "parameters": {…}}; {…}                              (Llama 3)
mistral      [TOOL_CALLS][{"name": …, "arguments": {…}}, …]                   (Mistral)
             [TOOL_CALLS]name[ARGS]{…}                                        (its newer models)

Add another family as one more entry in FORMATS.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A tool call format.

    `opening` comes before a call and `closing` after it; `around` are characters allowed between calls,
    besides whitespace. `bare`: a message may begin with a call without its opening. `named`: the name may
    come before the arguments, with or without `separator` between them. Ids of calls are `id_prefix` and
    `id_length` letters and digits.

    `forced`: a grammar forces calls, so all text is part of them. If it is cut short, what cannot be returned
    as a call is dropped; it was never meant as content.

    `calls` is what a grammar allows after the first opening, as Lark rules: {opening}, {closing}, {separator}
    stand for these markers, @call for a call as a JSON object with its arguments under `key`, and
    `name_first` for a name followed by its arguments.
    """

    opening: str = ""
    closing: str = ""
    around: str = ""
    bare: bool = False
    forced: bool = False
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
        calls="block (BLANKS {opening} block)* BLANKS\nblock: BLANKS @call BLANKS {closing}",
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
        calls="block (BLANKS {opening} block)* BLANKS\nblock: BLANKS (list | name_first)\n"
        'list: "[" BLANKS @call (BLANKS "," BLANKS @call)* BLANKS "]"',
    ),
}

REQUIRED = Format(around="[],", bare=True, forced=True)
"""The format that a grammar produces for required calls: a JSON list of calls, and nothing else."""


def find_format(name: str, template: str | None) -> Format | None:
    """Return the format called `name`; for "auto" the one that `template` uses.

    None for "none", and if none is detected.
    """
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
    """Return whether a chat template renders the list of tools."""
    return template is not None and "tools" in template
