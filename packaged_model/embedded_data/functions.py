"""Small Python functions from a one-line description, with follow-ups about the function just written."""

from __future__ import annotations

import random

from .base import Check, Choices, Conversation, Split, line_list, wording
from .composed import COMPOSED
from .function_kinds import KINDS, Kind
from .words import ENDINGS, made_up

# Whole combinations are held out; of the catalogue above them, wordings and constants.
COMBINED = Choices([COMPOSED])
ASK = line_list("""
    @do [write|make|create|code|define|show me|give me|build] a [|Python |small |small Python |short \
        ]function [that|which] {d}.
    @do [write|make|create|code|define|implement] a [|Python ]function [named|called] `{f}` [that|which] {d}.
    @do [implement|write|define|code] `{f}`, a [|Python ]function [that|which] {d}.
    I [need|want|would like|am looking for] a [|Python |small |short ]function [that|which] {d}.
    [How do I|How can I|How would you] write a [|Python ]function [that|which] {d}?
    [Python:|Code:|Wanted:|Python, please:] a function [that|which] {d}.
    Help me [with|to write] a [|Python |small ]function [that|which] {d}.
    I need `{f}`, a [|Python |small ]function [that|which] {d}.
    [What is|Show me] [the |]Python code [for|of] a function [that|which] {d}?
""")
LEAD = line_list("""
    Here is the function:
    Sure, here it is:
    This function does it:
    Here you go:
    Here is `{f}`:
""")
RENAME = line_list("""
    @do [rename it to|rename the function to|change its name to|change the name to|use the name] `{g}`.
    @do [call|name] [it|the function] `{g}`[| instead].
    [The|Its] [name|new name] should be `{g}`[| instead].
    It should be [called|named] `{g}`.
""")
DOCUMENT = line_list("""
    @do [add|write|put in] [a|a short|the] docstring[| to it| for it].
    @do document [it|the function|this function].
    [It|The function] [needs|should have|lacks] a docstring.
    [And|Now] [with|add] a docstring[|, please].
""")
EXPLAIN = line_list("""
    @do explain [it|the function|this function|the code|this code].
    @do [tell me|say|explain] what [it|this code|the function|this function] does.
    What does [it|this code|the function|this function] do?
    @do describe [it|the function|the code] in one sentence.
    How does [it|this code|the function] work?
""")
RESULT = line_list("""
    [What|And what] [does|would|will] `{call}` [return|give]?
    What [is|would be] the [result|value] of `{call}`?
    [What do I get|What comes|What comes back] from `{call}`?
    @do [tell me|give me|say] [the value of|the result of|what I get from] `{call}`.
""")


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"


def _document(code: str, text: str) -> str:
    head, _, body = code.partition("\n")
    return f'{head}\n    """{text[:1].upper()}{text[1:]}."""\n{body}'


def _follow_up(
    rng: random.Random, split: Split, chat: Conversation, kind: Kind, made: dict[str, str]
) -> None:
    """One turn about the last function: rename, document, explain or call it."""
    # What a function of several blocks returns is too much to work out in one's head.
    choice = rng.choice(("rename", "document", "explain", *(["result"] if kind in KINDS else [])))
    name, tests = made["f"], kind.filled_tests(made)
    if choice == "rename":
        made["f"] = f"{name.split('_')[0]}_{made_up(rng, split, ENDINGS).lower()}"
        made["code"] = made["code"].replace(f"def {name}(", f"def {made['f']}(")
        made["code"] = made["code"].replace(f" {name}(", f" {made['f']}(")
        check = Check("python", kind.filled_tests(made))
        chat.ask(wording(rng, split, RENAME).format(g=made["f"]), _fence(made["code"]), check)
    elif choice == "document" and '"""' not in made["code"]:
        made["code"] = _document(made["code"], made["d"])
        chat.ask(wording(rng, split, DOCUMENT), _fence(made["code"]), Check("python", tests))
    elif choice == "explain":
        chat.ask(wording(rng, split, EXPLAIN), f"`{name}` {made['d']}.", Check("facts", [name]))
    else:
        call, value = rng.choice(tests)
        chat.ask(
            wording(rng, split, RESULT).format(call=call),
            f"`{call}` returns `{value}`.",
            Check("facts", [value]),
        )


def generate(rng: random.Random, split: Split = "train") -> Conversation:
    """A request for a function, its code, and up to three follow-ups."""
    chat = Conversation("functions")
    for _ in range(rng.choice((1, 1, 2))):
        kind = rng.choice(KINDS) if rng.random() < 0.4 else COMBINED.draw(rng, split)
        made = kind.fill(rng, split)
        ask = wording(rng, split, ASK)
        if "{f}" in ask and rng.random() < 0.4:
            made["f"] = made_up(rng, split, ENDINGS).lower()
        made["code"] = kind.code(made)
        code = _fence(made["code"])
        lead = rng.choice(LEAD).format(f=made["f"]) + "\n\n" if rng.random() < 0.4 else ""
        # Without a name in the request, any name passes: ``_`` is the last function of the reply.
        check = Check("python", kind.filled_tests(made if "{f}" in ask else {**made, "f": "_"}))
        chat.ask(ask.format(d=made["d"], f=made["f"]), lead + code, check)
        for _ in range(rng.choice((0, 0, 1, 2))):
            _follow_up(rng, split, chat, kind, made)
    return chat
