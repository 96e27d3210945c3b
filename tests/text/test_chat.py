"""Chat templates render as in transformers; messages that cannot be rendered are refused by name."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from streamserve.protocol.errors import CheckpointError, RequestError
from streamserve.text.chat import ChatTemplate, Message, chat_template, require
from tests.text.folders import CHATML, byte_level_folder
from tests.text.templates import LLAMA3, MISTRAL, SPECIAL, TOOL

CHAT = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "  2 + 2?\n"},
    {"role": "assistant", "content": "  4 "},
    {"role": "user", "content": "🙂"},
]
ZEPHYR = """{% for message in messages %}
    {% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
    {% else %}
{{ '<|' ~ message['role'] ~ '|>\n' + message['content'] + eos_token }}
    {% endif %}
    {% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
    {% endif %}
{% endfor %}
"""
JSON = (
    "{% set ns = namespace(n=0) %}{% for message in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ message | tojson }}{% endfor %}{{ ns.n }}"
)
THINKING = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
TEMPLATES = [
    CHATML,
    LLAMA3,
    MISTRAL,
    ZEPHYR,
    JSON,
    THINKING,
    "{{ strftime_now('%Y') }}",
    "{{ tools is none }}",
]


def render(source: str, messages: list[Message], **settings: Any) -> str:
    return ChatTemplate(source, SPECIAL).render(messages, **settings)


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("generate", [True, False])
def test_renders_as_transformers(reference: Any, source: str, generate: bool) -> None:
    expected = reference.apply_chat_template(
        CHAT, chat_template=source, add_generation_prompt=generate, tokenize=False, enable_thinking=False
    )
    variables = {"enable_thinking": False}
    assert render(source, CHAT, add_generation_prompt=generate, variables=variables) == expected


@pytest.mark.parametrize("source", [CHATML, LLAMA3, ZEPHYR])
def test_an_open_final_message_ends_as_in_transformers(reference: Any, source: str) -> None:
    for content in ("The answer is", "The answer is  ", " The"):
        chat = [*CHAT, {"role": "assistant", "content": content}]
        expected = reference.apply_chat_template(
            chat, chat_template=source, continue_final_message=True, tokenize=False
        )
        prompt = render(source, chat, add_generation_prompt=False, continue_final_message=True)
        assert prompt == expected
        assert prompt.endswith(content.strip()) or prompt.endswith(content)


def test_the_folders_template_and_special_tokens_are_used(tmp_path: Path) -> None:
    from streamserve.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path, chat_template=LLAMA3))
    template = require(chat_template(tokenizer.chat_template, tokenizer.special_tokens))
    assert template.render(CHAT[1:2]) == (
        "<|begin|><|start_header_id|>user<|end_header_id|>\n\n2 + 2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one two"


def test_fields_that_are_null_are_not_there() -> None:
    source = "{{ 'content' in messages[0] }}"
    assert render(source, [{"role": "assistant", "content": None}]) == "False"


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_a_call_of_tools_has_an_empty_content(message: Message) -> None:
    calls = [{"type": "function", "function": {"name": "get_time", "arguments": {}}}]
    assert render("<{{ messages[0].content }}>", [{**message, "tool_calls": calls}]) == "<>"


def test_strftime_now_is_today() -> None:
    assert render("{{ strftime_now('%Y-%m-%d') }}", CHAT) == datetime.now().strftime("%Y-%m-%d")


def image() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ([{"role": "user", "content": [image()]}], "parts of type 'image_url' are not supported"),
        ([{"role": "user", "content": [{"type": "text"}]}], "needs its text"),
        ([{"role": "user", "content": ["text"]}], "list of parts with a type"),
        ([{"role": "user", "content": 5}], "must be a string or a list of parts"),
        ("Hello", r"messages\[0\] must be an object with role and content"),
    ],
)
def test_messages_that_cannot_be_rendered(messages: list[Message], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(CHATML, messages)
    assert (caught.value.field, caught.value.status) == ("messages", 400)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses"),
        ("{{ messages[0].nothing.at_all }}", "refuses"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(source, CHAT)
    assert (caught.value.field, caught.value.status) == ("messages", 400)


def test_continuing_excludes_a_generation_prompt() -> None:
    with pytest.raises(RequestError, match="add_generation_prompt set to false"):
        render(CHATML, CHAT, continue_final_message=True)


@pytest.mark.parametrize("final", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_continuing_needs_a_content(final: Message) -> None:
    with pytest.raises(RequestError, match="no content"):
        render(CHATML, [*CHAT, final], add_generation_prompt=False, continue_final_message=True)


def test_continuing_needs_a_template_that_writes_the_message() -> None:
    with pytest.raises(RequestError, match="drops the message"):
        render("{{ messages[0].content }}", CHAT, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_cannot_replace_the_requests_own_fields(name: str) -> None:
    with pytest.raises(RequestError, match=f"may not set {name}"):
        render(CHATML, CHAT, variables={name: []})


def test_a_broken_template_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="chat template, line 2"):
        ChatTemplate("one\n{% for %}", SPECIAL)


def test_a_checkpoint_without_template_says_what_to_do() -> None:
    with pytest.raises(RequestError, match=r"/v1/completions.*chat_template\.jinja"):
        require(chat_template(None, SPECIAL))


QUESTION = [{"role": "user", "content": "Hi"}]


def test_a_template_names_its_inputs() -> None:
    template = ChatTemplate("{{ messages[0].content }}{% set mine = 1 %}{{ mine }}{{ enable_thinking }}", {})
    assert template.variables == {"messages", "enable_thinking"}


def test_tools_under_another_name() -> None:
    source = "{% for tool in xml_tools %}{{ tool.function.name }}{% endfor %}{{ python_tools }}"
    template = ChatTemplate(source, {})
    assert template.render(QUESTION, tools=[TOOL]) == "f"
    assert template.render(QUESTION, tools=[TOOL], variables={"python_tools": "g"}) == "g"
    assert template.render(QUESTION) == ""


@pytest.mark.parametrize("reads", ["message['tools']", "message.tools"])
def test_tools_in_the_system_message(reads: str) -> None:
    source = (
        "{% for message in messages %}{{ message.role }}:{{ message.content }}{{ READS or '' }};{% endfor %}"
    )
    template = ChatTemplate(source.replace("READS", reads), {})
    tools = json.dumps([TOOL["function"]])
    assert template.render(QUESTION, tools=[TOOL]) == f"system:{tools};user:Hi;"
    system = [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert template.render(system, tools=[TOOL]) == f"system:Be brief.{tools};user:Hi;"
    assert template.render(system) == "system:Be brief.;user:Hi;"
