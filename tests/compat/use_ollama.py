"""Ollama's client: chats whole, streamed and asynchronous, generation, models, a format, errors, tool loops.

Run it with a Python that has Ollama's client: use_ollama.py URL.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import ollama
from tool_tasks import TASKS, TURNS, Task, call, declaration

MODEL = "small"
QUESTION: Any = [{"role": "user", "content": "What is 12 + 7?"}]
GREEDY: Any = {"temperature": 0, "num_predict": 200}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def run_task(client: ollama.Client, task: Task, streamed: bool) -> str:
    """Offer tools, execute the calls that the model makes, and return its answer to the results."""
    messages: list[Any] = [{"role": "user", "content": task.question}]
    fields: Any = {"tools": [declaration(name) for name in task.tools], "options": GREEDY}
    for _ in range(TURNS):
        if streamed:
            parts = [part.message for part in client.chat(MODEL, messages, stream=True, **fields)]
        else:
            parts = [client.chat(MODEL, messages, **fields).message]
        text = "".join(part.content or "" for part in parts)
        calls = [made for part in parts for made in part.tool_calls or ()]
        if not calls:
            return text
        messages.append(ollama.Message(role="assistant", content=text, tool_calls=calls))
        for made in calls:
            result = call(made.function.name, dict(made.function.arguments))
            messages.append(ollama.Message(role="tool", tool_name=made.function.name, content=result))
    return ""


def error_of(send: Callable[[], Any]) -> tuple[int, str]:
    """Return the status and the text of the error that a request gets."""
    try:
        send()
    except ollama.ResponseError as error:
        return error.status_code, error.error
    return 200, ""


async def asynchronous(url: str) -> str:
    parts = await ollama.AsyncClient(url).chat(MODEL, QUESTION, options=GREEDY, stream=True)
    return "".join([part.message.content or "" async for part in parts])


def main(url: str) -> None:
    client = ollama.Client(url)
    whole = client.chat(MODEL, QUESTION, options=GREEDY)
    parts = client.chat(MODEL, QUESTION, options=GREEDY, stream=True)
    generated = client.generate(MODEL, QUESTION[0]["content"], options=GREEDY, stream=True)
    formatted = client.chat(MODEL, QUESTION, format=COLOUR, options=GREEDY).message.content
    durations = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
    print(
        json.dumps(
            {
                "whole": whole.message.content,
                "streamed": "".join(part.message.content or "" for part in parts),
                "generated": "".join(part.response or "" for part in generated),
                "asynchronous": asyncio.run(asynchronous(url)),
                "models": [model.model for model in client.list().models],
                "capabilities": client.show(MODEL).capabilities,
                "format": json.loads(formatted or "{}")["colour"],
                "tokens": whole.prompt_eval_count,
                "durations": [whole[name] for name in durations],
                "errors": [
                    error_of(lambda: client.pull("other")),
                    error_of(lambda: client.chat("other", QUESTION)),
                    error_of(lambda: client.embed(MODEL, "a")),
                    error_of(lambda: client.generate(MODEL, "a", suffix="b")),
                ],
                "loops": [
                    task.is_answered(run_task(client, task, streamed=index % 2 == 1))
                    for index, task in enumerate(TASKS)
                ],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
