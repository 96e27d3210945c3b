"""A request may bring a chat template if the operator allows it, with the limits of every template."""

from typing import Any

import pytest

from streamserve.api.settings import ApiSettings
from tests.api.refusing import USER, refused
from tests.api.serving import ScriptedGenerator, scripted

CHATS = "/v1/chat/completions"
TEMPLATE = "{% for message in messages %}[{{ message.content }}{{ mark }}]{% endfor %}"
FIELDS: dict[str, Any] = {"messages": [USER], "chat_template": TEMPLATE}


def test_without_the_operator_s_permission_it_is_refused_with_what_to_do(
    generator: ScriptedGenerator,
) -> None:
    with scripted(generator) as server:
        for route in (CHATS, "/tokenize"):
            error = refused(server.post(route, **FIELDS), 400)
            assert error["param"] == "chat_template"
            assert "leave it out, or start the server with --trust-request-chat-template" in error["message"]


def test_with_it_conversations_are_rendered_by_the_template(generator: ScriptedGenerator) -> None:
    with scripted(generator, ApiSettings(trust_request_chat_template=True)) as server:
        tokens = server.post("/tokenize", **FIELDS, chat_template_kwargs={"mark": "!"}).json()["tokens"]
        chat = server.post(CHATS, **FIELDS, max_tokens=1, return_token_ids=True).json()
        plain = server.post(CHATS, messages=[USER], max_tokens=1, return_token_ids=True).json()
    assert generator.tokenizer.decode(tokens) == f"[{USER['content']}!]"
    assert generator.tokenizer.decode(chat["prompt_token_ids"]) == f"[{USER['content']}]"
    assert plain["prompt_token_ids"] != chat["prompt_token_ids"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "chat_template does not compile: the chat template, line 1"),
        ("x" * 70_000, "chat_template has 70000 characters, and 65536 is the limit"),
        ("{{ 'a' * 134217729 }}", "the chat template refuses this conversation: it makes texts"),
        ("{{ ''.__class__.__mro__ }}", "the chat template refuses this conversation: "),
        ("no message", "the chat template leaves out the content of messages"),
    ],
)
def test_a_template_beyond_the_limits_is_refused(
    generator: ScriptedGenerator, template: str, message: str
) -> None:
    with scripted(generator, ApiSettings(trust_request_chat_template=True)) as server:
        error = refused(server.post(CHATS, messages=[USER], chat_template=template), 400)
    assert message in error["message"]
