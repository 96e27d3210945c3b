"""Tool calls: choose a function, take its arguments from the request, answer from its result.

Calls have the format of Hermes and Qwen. The list of tools stands in the system message, as the chat template
writes it: one line a function.
"""

from __future__ import annotations

import json
import random
from typing import Any

from . import judging_tasks, list_tasks, sentence_tasks, small_talk
from .base import Check, Conversation, Split, line_list, pick, wording
from .tool_catalogue import ENUMS, SLOTS, TOOLS, WHOLE, Parameter, Tool

Function = dict[str, Any]
OTHER_TASKS = (
    judging_tasks.classify, judging_tasks.know, list_tasks.edit_list, list_tasks.format_list,
    sentence_tasks.change_case, small_talk.chat, small_talk.chat,
)  # fmt: skip
NO_TOOL = "I am sorry, I have no tool for that."
BOTH = ("{a} And {b}", "{a} Also, {b}", "{a} {B}", "{a} Then {b}")
AFTER = line_list("""
    [Thanks|Thank you|Great|Perfect|Good|Nice|Very good][!|.]
    [OK|Okay|All right|Fine|Wonderful], [thanks|thank you][!|.]
""")
WELCOME = "You are welcome. What else can I do for you?"


class Offer:
    """A tool as one chat offers it: with one of its names, and one for each parameter."""

    def __init__(self, rng: random.Random, tool: Tool) -> None:
        self.tool = tool
        self.name = rng.choice(tool.names.split("|"))
        self.description = rng.choice(tool.descriptions.split("|"))
        self.names = {parameter.slot: rng.choice(parameter.names.split("|")) for parameter in tool.parameters}

    def function(self) -> Function:
        """The function as clients declare it."""
        properties = {self.names[p.slot]: _schema(p) for p in self.tool.parameters}
        required = [self.names[p.slot] for p in self.tool.parameters if not p.given]
        parameters = {"type": "object", "properties": properties, "required": required}
        return {"name": self.name, "description": self.description, "parameters": parameters}

    def request(self, rng: random.Random, split: Split) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """A request for it, the values of the slots, and the arguments of the call."""
        values = {p.slot: SLOTS[p.slot](rng, split) for p in self.tool.parameters}
        given = {p.slot for p in self.tool.parameters if not p.given or rng.random() < 0.35}
        text = pick(rng, split, self.tool.asks)
        for parameter in self.tool.parameters:
            if parameter.given and parameter.slot in given:
                text += parameter.given.replace("{v}", "{" + parameter.slot + "}")
        if rng.random() < 0.12 and text[1:2].islower():
            text = text[0].lower() + text[1:]
        mark = "?" if text.lower().startswith(_QUESTIONS) else "."
        text = text.format(**values) + (mark if rng.random() < 0.9 else "")
        arguments = {self.names[p.slot]: values[p.slot] for p in self.tool.parameters if p.slot in given}
        return text, values, arguments


_QUESTIONS = (
    "what", "how", "is ", "are ", "do ", "did ", "does", "which", "where", "when", "can ", "could", "would",
    "under",
)  # fmt: skip


def _schema(parameter: Parameter) -> dict[str, Any]:
    if parameter.slot in ENUMS:
        return {"type": "string", "enum": list(ENUMS[parameter.slot])}
    return {"type": "integer" if parameter.slot in WHOLE else "string"}


def signature(function: Function) -> str:
    """One line for a function, as the chat template writes it."""
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or []
    shown = [
        f"{name}{'' if name in required else '?'}: {_type(schema)}"
        for name, schema in (parameters.get("properties") or {}).items()
    ]
    described = f": {function['description']}" if function.get("description") else ""
    return f"- {function['name']}({', '.join(shown)}){described}"


def _type(schema: dict[str, Any]) -> str:
    if schema.get("enum"):
        return "|".join(str(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"{(schema.get('items') or {}).get('type', 'any')}[]"
    return schema["type"] if isinstance(schema.get("type"), str) else "any"


def listed(functions: list[Function]) -> str:
    """The list of tools in a system message."""
    return "\n".join(["Tools:", *map(signature, functions)])


def call_text(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """A message that calls functions (name, arguments)."""
    blocks = (
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        for name, arguments in calls
    )
    return "\n".join(blocks)


def _ask(chat: Conversation, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    chat.ask(text, call_text(calls), Check("calls", calls))


def _answer(chat: Conversation, results: list[dict[str, Any]], answers: list[str], facts: list[str]) -> None:
    chat.messages += [{"role": "tool", "content": json.dumps(result)} for result in results]
    chat.messages.append({"role": "assistant", "content": " ".join(answers)})
    chat.checks.append(Check("facts", facts))


def _use(rng: random.Random, split: Split, chat: Conversation, offers: list[Offer]) -> None:
    """A request for one tool, or for two at once; the result, and the answer."""
    wanted = [rng.choice(offers)]
    if rng.random() < 0.25:
        wanted.append(rng.choice(offers))
    made = [offer.request(rng, split) for offer in wanted]
    text = made[0][0]
    if len(made) == 2:
        second = made[1][0]
        lowered = second if second.startswith(("I ", "I'")) else second[0].lower() + second[1:]
        first = text if text.endswith((".", "?")) else f"{text}."
        text = rng.choice(BOTH).format(a=first, b=lowered, B=second)
    _ask(chat, text, [(offer.name, args) for offer, (_, _, args) in zip(wanted, made, strict=True)])
    if rng.random() < 0.15:
        return
    results, answers, facts = [], [], []
    for offer, (_, values, _) in zip(wanted, made, strict=True):
        result = offer.tool.result(rng, split)
        results.append(result)
        answers.append(offer.tool.answer.format(**values, **result))
        told = [str(result[name]) for name in result if "{" + name + "}" in offer.tool.answer]
        facts += told or [answers[-1].rstrip(".").split()[-1]]
    _answer(chat, results, answers, facts)
    if rng.random() < 0.15:
        chat.ask(wording(rng, split, AFTER), WELCOME, Check("no_call"))


def _decline(rng: random.Random, split: Split, chat: Conversation, offers: list[Offer]) -> None:
    """A request that none of the tools serves."""
    unknown = [tool for tool in TOOLS if all(tool is not offer.tool for offer in offers)]
    other = Offer(rng, rng.choice(unknown))
    chat.ask(other.request(rng, split)[0], NO_TOOL, Check("no_call"))


def _other(rng: random.Random, split: Split, chat: Conversation) -> None:
    """A task that needs no tool."""
    before = len(chat.checks)
    rng.choice(OTHER_TASKS)(rng, split, chat)
    chat.checks[before:] = [Check("no_call")] * (len(chat.checks) - before)


def generate(rng: random.Random, split: Split = "train") -> Conversation:
    """A chat with one to five tools: calls, answers from their results, and requests without a call."""
    chat = Conversation("tools")
    offers = [Offer(rng, tool) for tool in rng.sample(TOOLS, rng.choice((1, 2, 2, 3, 3, 4, 5)))]
    chat.messages.append({"role": "system", "content": listed([offer.function() for offer in offers])})
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        chance = rng.random()
        if chance < 0.66:
            _use(rng, split, chat, offers)
            if chat.messages[-1]["content"].startswith("<tool_call>"):
                break  # the result of a call comes before anything else
        elif chance < 0.82:
            _decline(rng, split, chat, offers)
        else:
            _other(rng, split, chat)
    return chat
