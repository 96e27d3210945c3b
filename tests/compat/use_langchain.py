"""LangChain's ChatOpenAI: a chat whole, streamed, with a tool and structured; and tool loops.

Run it with a Python that has LangChain: use_langchain.py URL.
"""

import json
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from tool_tasks import TASKS, TURNS, Task, call, declaration


class Choice(BaseModel):
    """A colour."""

    colour: Literal["red", "green"]


@tool
def choose(colour: Literal["red", "green"]) -> str:
    """Choose a colour."""
    return colour


def run_task(model: ChatOpenAI, task: Task) -> str:
    """Offer tools, execute the calls that the model makes, and return its answer to the results."""
    offering = model.bind_tools([declaration(name) for name in task.tools])
    messages: list[Any] = [HumanMessage(task.question)]
    for _ in range(TURNS):
        reply = offering.invoke(messages)
        if not reply.tool_calls:
            return str(reply.text)
        messages.append(reply)
        for chosen in reply.tool_calls:
            messages.append(ToolMessage(call(chosen["name"], chosen["args"]), tool_call_id=chosen["id"]))
    return ""


def main(url: str) -> None:
    model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="small", temperature=0, max_tokens=300)
    question = "What is 12 + 7?"
    called = model.bind_tools(
        [choose], tool_choice="required", strict=True, parallel_tool_calls=False
    ).invoke(question)
    structured = model.with_structured_output(Choice, method="json_schema").invoke(question)
    print(
        json.dumps(
            {
                "whole": model.invoke(question).content,
                "streamed": "".join(part.content for part in model.stream(question)),
                "tool": [call["name"] for call in called.tool_calls],
                "structured": structured.colour,
                "loops": [task.is_answered(run_task(model, task)) for task in TASKS],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
