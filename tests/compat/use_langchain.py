"""LangChain's ChatOpenAI: a chat whole, streamed, with a tool, structured.

Run with the Python that has it: use_langchain.py URL.
"""

import json
import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Choice(BaseModel):
    """A colour."""

    colour: Literal["red", "green"]


@tool
def choose(colour: Literal["red", "green"]) -> str:
    """Choose a colour."""
    return colour


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
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
