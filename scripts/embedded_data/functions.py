"""Small Python functions from a one-line description, with follow-ups about the function just written."""

from __future__ import annotations

import random

from .base import Check, Conversation, Split, line_list, pick
from .function_kinds import KINDS, Kind
from .words import ENDINGS, made_up

ASK = line_list("""
    Write a Python function that {d}.
    Write a function named `{f}` that {d}.
    I need a Python function that {d}.
    Can you write a function that {d}?
    Please write a Python function `{f}` which {d}.
    Give me a function that {d}.
    Define a function `{f}` that {d}.
    Create a Python function that {d}.
    Show me Python code for a function that {d}.
    Implement `{f}`, a function that {d}.
    Python: a function that {d}.
    Make a function called `{f}` that {d}.
    How do I write a function that {d}?
    Help me with a Python function that {d}.
    Code a function which {d}.
    I want a small function that {d}.
""")
LEAD = line_list("""
    Here is the function:
    Sure, here it is:
    This function does it:
    Here you go:
    Here is `{f}`:
""")
RENAME = line_list("""
    Rename it to `{g}`.
    Call it `{g}` instead.
    Please name it `{g}`.
    Can you rename the function to `{g}`?
    Use the name `{g}`.
    Now change its name to `{g}`.
    The name should be `{g}`.
""")
DOCUMENT = line_list("""
    Add a docstring.
    Please document it.
    Can you add a docstring to it?
    Now add a short docstring.
    Put a docstring in it.
    It needs a docstring.
    Write a docstring for it too.
""")
EXPLAIN = line_list("""
    Explain it.
    What does it do?
    Explain the function, please.
    Can you say what it does?
    Describe it in one sentence.
    How does it work?
    Tell me what this code does.
""")
RESULT = line_list("""
    What does `{call}` return?
    What is the result of `{call}`?
    And what does `{call}` give?
    What do I get from `{call}`?
    Tell me the value of `{call}`.
    What would `{call}` return?
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
    choice = rng.choice(("rename", "document", "explain", "result", "result"))
    name, tests = made["f"], kind.filled_tests(made)
    if choice == "rename":
        made["f"] = f"{name.split('_')[0]}_{made_up(rng, split, ENDINGS).lower()}"
        made["code"] = made["code"].replace(f"def {name}(", f"def {made['f']}(")
        made["code"] = made["code"].replace(f" {name}(", f" {made['f']}(")
        check = Check("python", kind.filled_tests(made))
        chat.ask(pick(rng, split, RENAME).format(g=made["f"]), _fence(made["code"]), check)
    elif choice == "document" and '"""' not in made["code"]:
        made["code"] = _document(made["code"], made["d"])
        chat.ask(pick(rng, split, DOCUMENT), _fence(made["code"]), Check("python", tests))
    elif choice == "explain":
        chat.ask(pick(rng, split, EXPLAIN), f"`{name}` {made['d']}.", Check("facts", [name]))
    else:
        call, value = rng.choice(tests)
        chat.ask(
            pick(rng, split, RESULT).format(call=call),
            f"`{call}` returns `{value}`.",
            Check("facts", [value]),
        )


def generate(rng: random.Random, split: Split = "train") -> Conversation:
    """A request for a function, its code, and up to three follow-ups."""
    chat = Conversation("functions")
    for _ in range(rng.choice((1, 1, 2))):
        kind = rng.choice(KINDS)
        made = kind.fill(rng, split)
        ask = pick(rng, split, ASK)
        if "{f}" in ask and rng.random() < 0.3:
            made["f"] = made_up(rng, split, ENDINGS).lower()
        made["code"] = kind.code(made)
        code = _fence(made["code"])
        lead = rng.choice(LEAD).format(f=made["f"]) + "\n\n" if rng.random() < 0.4 else ""
        chat.ask(ask.format(d=made["d"], f=made["f"]), lead + code, Check("python", kind.filled_tests(made)))
        for _ in range(rng.choice((0, 0, 1, 2))):
            _follow_up(rng, split, chat, kind, made)
    return chat
