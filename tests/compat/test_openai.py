"""Methods of the `openai` client work with a real server."""

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.compat.tool_tasks import ENOUGH, TASKS, TURNS, Task, call, declaration
from tests.serving import Served

QUESTION: Any = [{"role": "user", "content": "What is 12 + 7?"}]
ANSWER = "12 + 7 = 19."
CHOOSE: Any = {
    "type": "function",
    "function": {
        "name": "choose",
        "description": "choose a colour",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"type": "string", "enum": ["red", "green"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


class Choice(pydantic.BaseModel):
    """The structure of a short answer."""

    colour: Literal["red", "green"]
    certain: bool


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "streamserve"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("large")


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="small", prompt="Once upon", max_tokens=8, temperature=0)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    stream = client.completions.create(
        model="small", prompt="Once upon", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(part.choices[0].text for part in stream) == whole.choices[0].text


def test_several_prompts_and_choices(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="small", prompt=["a", "b"], n=2, max_tokens=3, seed=1)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="small", messages=QUESTION, temperature=0)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (ANSWER, "stop")


def test_chat_streams(client: openai.OpenAI) -> None:
    parts = client.chat.completions.create(
        model="small",
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *rest, last = parts
    assert "".join(part.choices[0].delta.content or "" for part in rest) == ANSWER
    assert last.usage is not None
    assert last.usage.completion_tokens > 5


def test_the_stream_helper_assembles_a_chat(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="small", messages=QUESTION, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER
    assert kinds >= {"chunk", "content.delta", "content.done"}


def test_raw_responses_carry_the_request_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="small", messages=QUESTION, max_tokens=2, extra_headers={"X-Request-Id": "mine-17"}
    )
    assert raw.status_code == 200
    assert raw.request_id == raw.headers["x-request-id"] == "mine-17"
    assert raw.parse().choices[0].finish_reason == "length"


def test_responses(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="small", input="What is 12 + 7?", temperature=0)
    assert (reply.output_text, reply.status) == (ANSWER, "completed")


def test_responses_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="small", input="What is 12 + 7?", temperature=0) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert deltas == final.output_text == ANSWER


def test_structured_answers_are_parsed(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model="small", messages=QUESTION, max_tokens=300, temperature=0, response_format=Choice
    )
    assert isinstance(reply.choices[0].message.parsed, Choice)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "choose"}}])
def test_required_tools_are_called(client: openai.OpenAI, choice: Any) -> None:
    body: Any = {
        "model": "small",
        "messages": QUESTION,
        "tools": [CHOOSE],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 300,
    }
    (call,) = client.chat.completions.create(**body).choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "choose"
    assert json.loads(call.function.arguments)["colour"] in ("red", "green")
    with client.chat.completions.stream(**body) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)


def test_tools_may_be_unused(client: openai.OpenAI) -> None:
    for choice in ("auto", "none"):
        reply = client.chat.completions.create(
            model="small", messages=QUESTION, tools=[CHOOSE], tool_choice=choice, temperature=0, max_tokens=20
        )
        assert reply.choices[0].message.content


def run_task(client: openai.OpenAI, task: Task) -> str:
    """Offer tools, execute the calls that the model makes, and return its answer to the results."""
    tools: Any = [declaration(name) for name in task.tools]
    messages: Any = [{"role": "user", "content": task.question}]
    body: Any = {"model": "small", "messages": messages, "tools": tools, "temperature": 0, "max_tokens": 200}
    for _ in range(TURNS):
        message = client.chat.completions.create(**body).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.to_dict())
        for chosen in message.tool_calls:
            assert chosen.type == "function"
            result = call(chosen.function.name, json.loads(chosen.function.arguments))
            messages.append({"role": "tool", "tool_call_id": chosen.id, "content": result})
    return ""


def test_tool_loops(client: openai.OpenAI, record: Callable[..., None]) -> None:
    answers = [run_task(client, task) for task in TASKS]
    right = sum(task.is_answered(answer) for task, answer in zip(TASKS, answers, strict=True))
    assert right >= ENOUGH, list(zip(TASKS, answers, strict=True))
    record(tasks=len(TASKS), right=right)


async def test_the_async_client(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="small", messages=QUESTION, temperature=0, stream=True
        )
        text = "".join([part.choices[0].delta.content or "" async for part in stream])
    assert text == ANSWER


def test_errors_are_of_the_clients_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="small", prompt="a", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="is generate, not embed"):
        client.embeddings.create(model="small", input="a")
