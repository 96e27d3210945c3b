"""POST /tokenize and /detokenize have the same bodies as in vLLM."""

from pathlib import Path
from typing import Any

import pytest

from streamserve.text.tokenizer import Tokenizer
from tests.api.refusing import USER, refused
from tests.api.serving import ScriptedGenerator, Served, scripted
from tests.text.folders import byte_level_folder


def test_a_text_and_back(hello: Served, generator: ScriptedGenerator) -> None:
    text = "héllo <|end|> 語"
    reply = hello.post("/tokenize", prompt=text).json()
    assert reply["tokens"] == generator.tokenizer.encode(text)
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 64)
    assert reply["token_strs"] is None
    bare = hello.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert bare == reply["tokens"][1:]
    assert hello.post("/detokenize", tokens=bare).json() == {"prompt": text}


def test_tokens_as_the_vocabulary_writes_them(hello: Served, generator: ScriptedGenerator) -> None:
    reply = hello.post("/tokenize", prompt="é", return_token_strs=True).json()
    assert reply["token_strs"] == [generator.tokenizer.piece(token) for token in reply["tokens"]]
    assert reply["token_strs"][1:] == ["Ã", "©"]


def test_a_conversation_gives_the_tokens_a_chat_would_have(server: Served) -> None:
    messages = [USER]
    for fields in ({}, {"add_generation_prompt": False}):
        reply = server.post("/tokenize", messages=messages, **fields).json()
        chat = server.post(
            "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True, **fields
        ).json()
        assert reply["tokens"] == chat["prompt_token_ids"]
        assert reply["count"] == chat["usage"]["prompt_tokens"]


def test_tools_are_part_of_the_conversation(generator: ScriptedGenerator, tmp_path: Path) -> None:
    template = "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}hi"
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path, chat_template=template))
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with scripted(generator.replaced(tokenizer=tokenizer)) as server:
        tokens = server.post("/tokenize", messages=[USER], tools=[tool]).json()["tokens"]
    assert tokenizer.decode(tokens) == "<tool_call>weatherhi"


def test_long_texts_are_decoded_too(hello: Served, tokenizer: Tokenizer) -> None:
    tokens = [70] * 10_000
    assert hello.post("/detokenize", tokens=tokens).json()["prompt"] == tokenizer.decode([70]) * 10_000


@pytest.mark.parametrize(
    ("route", "body", "param", "message"),
    [
        ("/tokenize", {}, "prompt", "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt", "either prompt or messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "expected `str"),
        (
            "/tokenize",
            {"prompt": "a", "add_generation_prompt": False},
            "add_generation_prompt",
            "needs messages",
        ),
        ("/tokenize", {"prompt": "x" * 10_000}, "prompt", "maximum context length is 64 tokens"),
        ("/tokenize", {"messages": []}, "messages", "at least one message"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template", "needs messages"),
        ("/detokenize", {}, "tokens", "tokens is required"),
        ("/detokenize", {"tokens": [5, 320]}, "tokens", "tokens has 320, but the vocabulary has 320"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "tokens has -1"),
        ("/detokenize", {"tokens": ["a"]}, "tokens", "got `str`"),
    ],
)
def test_what_is_refused(hello: Served, route: str, body: dict[str, Any], param: str, message: str) -> None:
    error = refused(hello.post(route, **body))
    assert error["param"] == param
    assert message in error["message"]


def test_models_that_are_not_served(hello: Served) -> None:
    assert refused(hello.post("/tokenize", prompt="a", model="gpt-4"), 404)["param"] == "model"
    assert refused(hello.post("/detokenize", tokens=[5], model="gpt-4"), 404)["param"] == "model"
