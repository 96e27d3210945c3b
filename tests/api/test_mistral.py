"""Conversations work with a model that has only Mistral's own tokenizer."""

from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
import pytest
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from streamserve.api.generator import Item
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta, Usage
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import ScriptedGenerator, Served, scripted
from tests.text.folders import tekken_folder

MESSAGES: Any = [{"role": "user", "content": "Weather [/INST]?"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}
CHATS = "/v1/chat/completions"


async def says(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
    for piece in ("[THINK]Hm[/THI", "NK][TOOL_CALLS]f[AR", 'GS]{"a": 1}'):
        yield ChoiceDelta(0, piece, (72,))
    yield ChoiceDelta(0, tokens=(2,), finish="stop")
    yield Usage(len(prompt), 4)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> MistralTokenizer:
    return MistralTokenizer.from_file(tekken_folder(tmp_path_factory.mktemp("mistral")) / "tekken.json")


@pytest.fixture(scope="module")
def server(original: MistralTokenizer) -> Iterator[Served]:
    folder = original.instruct_tokenizer.tokenizer.file_path.parent
    generator = ScriptedGenerator(Tokenizer.from_folder(folder), script=says)
    model = msgspec.structs.replace(generator.model, max_model_len=2048)
    with scripted(generator.replaced(model=model)) as running:
        yield running


def test_the_prompt_is_rendered_by_the_library(server: Served, original: MistralTokenizer) -> None:
    request: Any = ChatCompletionRequest.from_openai(messages=MESSAGES, tools=[TOOL])
    expected = original.encode_chat_completion(request).tokens
    assert server.post(CHATS, messages=MESSAGES, tools=[TOOL]).status_code == 200
    assert server.llm.submitted[-1].prompt == expected
    assert server.post("/tokenize", messages=MESSAGES, tools=[TOOL]).json()["tokens"] == expected
    assert server.post(CHATS, messages=MESSAGES, tools=[TOOL], truncate_prompt_tokens=3).status_code == 200
    assert server.llm.submitted[-1].prompt == expected[-3:]


def test_reasoning_and_calls_are_parsed(server: Served) -> None:
    message = server.post(CHATS, messages=MESSAGES, tools=[TOOL]).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert len(call["id"]) == 9
    assert server.llm.submitted[-1].params.skip_special_tokens is False


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHATS, {"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        (CHATS, {"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        (
            CHATS,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 100_000}]}]},
            "messages",
        ),
        (CHATS, {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/v1/streams", {"messages": [{"role": "user", "content": "{context}"}]}, "messages"),
    ],
)
def test_refusals(server: Served, route: str, fields: dict[str, Any], param: str) -> None:
    response = server.post(route, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
