"""The commands of `streamserve chat`, tested with a model that repeats the conversation."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Self

import pytest
from typer.testing import CliRunner

from streamserve.cli.chat import HELP
from streamserve.cli.main import app


class EchoLLM:
    """A model that answers with the contents of all messages."""

    tokenizer = SimpleNamespace(encode=str.encode)
    model = SimpleNamespace(max_model_len=1000)

    @classmethod
    def from_settings(cls, settings: Any) -> Self:
        return cls()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def render(self, messages: list[dict[str, str]]) -> str:
        return "|".join(message["content"] for message in messages)

    def stream(self, prompt: str, params: Any, lora: str) -> Iterator[Any]:
        yield SimpleNamespace(text=f"[{prompt}]")


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "streamserve.llm.llm", SimpleNamespace(LLM=EchoLLM))
    done = CliRunner().invoke(app, ["chat", "--system", "s"], input="a\nb\n/help\n/clear\nc\n\n")
    assert done.exit_code == 0
    assert done.stdout == f"> [s|a]\n> [s|a|[s|a]|b]\n> {HELP}\n> > [s|c]\n> "
