"""Methods of the `anthropic` client work with a real server of the packaged model."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

from tests.compat.tool_tasks import ENOUGH, TASKS, TURNS, Task, call, declaration
from tests.serving import Served

QUESTION: Any = [{"role": "user", "content": "What is 12 + 7?"}]
ANSWER = "12 + 7 = 19."
GREEDY: Any = {"temperature": 0}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def tool(name: str) -> Any:
    """A tool as requests to Anthropic's API declare it."""
    function = declaration(name)["function"]
    return {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="small", max_tokens=50, messages=QUESTION, extra_body=GREEDY)
    assert [block.to_dict()["text"] for block in message.content] == [ANSWER]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 5


def test_a_streamed_message(client: anthropic.Anthropic) -> None:
    fields: Any = {"model": "small", "max_tokens": 50, "messages": QUESTION, "extra_body": GREEDY}
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().stop_reason == "end_turn"


def run_task(client: anthropic.Anthropic, task: Task, streamed: bool) -> str:
    """Offer tools, execute the calls that the model makes, and return its answer to the results."""
    messages: Any = [{"role": "user", "content": task.question}]
    fields: Any = {
        "model": "small",
        "max_tokens": 200,
        "tools": [tool(name) for name in task.tools],
        "extra_body": GREEDY,
    }
    for _ in range(TURNS):
        if streamed:
            with client.messages.stream(messages=messages, **fields) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(messages=messages, **fields)
        calls = [block for block in message.content if block.type == "tool_use"]
        if message.stop_reason != "tool_use":
            return "".join(block.text for block in message.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": made.id, "content": call(made.name, made.input)}
            for made in calls
        ]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    return ""


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_loops(client: anthropic.Anthropic, record: Callable[..., None], streamed: bool) -> None:
    answers = [run_task(client, task, streamed) for task in TASKS]
    right = sum(task.is_answered(answer) for task, answer in zip(TASKS, answers, strict=True))
    assert right >= ENOUGH, list(zip(TASKS, answers, strict=True))
    record(tasks=len(TASKS), right=right)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_time"}])
def test_a_call_is_forced(client: anthropic.Anthropic, choice: Any) -> None:
    message = client.messages.create(
        model="small", max_tokens=300, messages=QUESTION, tools=[tool("get_time")], tool_choice=choice,
        extra_body=GREEDY,
    )  # fmt: skip
    assert message.stop_reason in ("tool_use", "max_tokens")
    (block, *_) = message.content
    assert block.type == "tool_use"
    assert block.name == "get_time"
    assert isinstance(block.input, dict)
    assert json.dumps(block.input)


def test_counted_tokens_are_those_of_the_message(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="small", messages=QUESTION)
    message = client.messages.create(model="small", max_tokens=1, messages=QUESTION)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
