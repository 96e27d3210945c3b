"""The flags that guides and operations pages name exist in some command."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from streamserve.cli.main import app
from tests.docs.pages import DOCS

PAGES = sorted([*(DOCS / "guides").glob("*.md"), *(DOCS / "operations").glob("*.md")])
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+\b")
FOREIGN = {
    "--index-url", "--extra-index-url",  # pip
    "--constraint", "--data", "--dataset-name", "--tokenizer",  # GuideLLM, vllm bench
    "--enable-auto-tool-choice", "--enable-lora", "--lora-modules", "--tool-call-parser",  # vLLM
    "--cpus", "--env", "--publish", "--rm", "--scale", "--tag", "--volume",  # podman, docker compose
    "--cacert",  # curl
}  # fmt: skip
"""Flags of other programs."""


def declared(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for each in getattr(command, "commands", {}).values():
        yield from declared(each)


KNOWN = set(declared(typer.main.get_command(app)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_flags_exist(page: Any) -> None:
    text = page.read_text(encoding="utf-8")
    if page.stem == "coming-from":  # the left column has flags of other programs
        text = "\n".join(line.rstrip("| ").rpartition(" | ")[2] for line in text.splitlines())
    assert set(FLAG.findall(text)) - KNOWN - FOREIGN == set()


def test_every_foreign_flag_is_named_and_unknown() -> None:
    named = set(FLAG.findall("".join(page.read_text(encoding="utf-8") for page in PAGES)))
    assert named >= FOREIGN
    assert not KNOWN & FOREIGN
