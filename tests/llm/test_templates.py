"""The operator's chat template replaces the model's own, with the limits of every template."""

from pathlib import Path
from typing import Any

import pytest

from streamserve import embedded
from streamserve.llm.async_llm import AsyncLLM
from streamserve.llm.chats import render_chat
from streamserve.protocol.errors import CheckpointError, RequestError
from streamserve.settings.options import SettingsError
from streamserve.settings.resolve import resolve
from streamserve.settings.templates import MAX_TEMPLATE_BYTES
from streamserve.text.chat import MAX_GIVEN_TEMPLATE, given_template
from streamserve.text.tokenizer import Tokenizer

TEMPLATE = "{{ eos_token }}{% for message in messages %}[{{ message.content }}]{% endfor %}{{ tools }}"
CALLS = "{{ tools }}[TOOL_CALLS]"
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE + CALLS, encoding="utf-8")
    return file


async def test_a_given_template_replaces_the_model_s(file: Path) -> None:
    llm = AsyncLLM(resolve("embedded", {"chat_template": str(file)}, environ={}, use="llm"))
    prompt = render_chat(llm.tokenizer, llm.chat_template, CHAT)
    assert prompt["prompt"] == f"{llm.tokenizer.special_tokens['eos_token']}[Hello]NoneNone[TOOL_CALLS]"
    assert llm.tokenizer.template_signs == TEMPLATE + CALLS, "formats of calls are detected from it"
    assert prompt["prompt_token_ids"] == llm.tokenizer.encode(prompt["prompt"], add_special_tokens=False)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "there is no such file: give a file with a Jinja template"),
        (b"\xff", "is not a text in UTF-8"),
        (b" " * (MAX_TEMPLATE_BYTES + 1), f"has more than {MAX_TEMPLATE_BYTES} bytes, which is the limit"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_before_a_model_is_loaded(
    file: Path, content: bytes | None, error: str
) -> None:
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        resolve("embedded", {"chat_template": str(file)}, environ={})
    assert str(caught.value) == f"chat_template = '{file}': {error}"


def test_a_template_that_does_not_compile_is_refused_with_its_line(file: Path) -> None:
    file.write_text("\n{% if %}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="the chat template, line 2: "):
        AsyncLLM(resolve("embedded", {"chat_template": str(file)}, environ={}))


def test_a_tokenizer_that_renders_conversations_takes_no_template() -> None:
    tokenizer = Tokenizer.from_folder(embedded.path("embedded"))
    tokenizer.check_takes_template()
    renderer: Any = object()
    own = Tokenizer(tokenizer._backend, renderer=renderer)
    with pytest.raises(CheckpointError, match="renders conversations itself: leave the template out"):
        own.check_takes_template()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("x" * (MAX_GIVEN_TEMPLATE + 1), f"{MAX_GIVEN_TEMPLATE} is the limit"),
        ("{% for %}", "does not compile: the chat template, line 1"),
        ("{% for a in b %}" * 100 + "{% endfor %}" * 100, "does not compile: "),
        ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "does not compile: "),
    ],
)
def test_a_template_of_a_request_is_bounded_when_it_is_compiled(source: str, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        given_template(source, ())


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'|center(1048576) }}" * 2000,
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ ('a' * 65536) ~ ('b' * 134217728) }}",
    ],
)
def test_a_template_of_a_request_is_bounded_when_it_is_rendered(source: str) -> None:
    """Constants are not computed while a template is compiled, where nothing counts them."""
    template = given_template(source, ())
    with pytest.raises(RequestError, match="the chat template refuses this conversation: "):
        template.render(CHAT)
