"""Answers in the terminal: sampling options, and text that is printed while it is generated."""

import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.options import Settings

if TYPE_CHECKING:
    from streamserve.llm.llm import LLM

MaxTokens = Annotated[int, typer.Option(help="maximum number of tokens to generate")]
Temperature = Annotated[float, typer.Option(help="sampling temperature; 0: always the likeliest token")]
TopP = Annotated[float, typer.Option(help="sample from the likeliest tokens with this total probability")]
Seed = Annotated[int | None, typer.Option(help="seed for sampling; the same seed gives the same text")]


def user_message(text: str) -> dict[str, str]:
    """Return a user's message of a chat."""
    return {"role": "user", "content": text}


def print_stream(llm: "LLM", prompt: str | list[int], params: SamplingParams) -> str:
    """Print the text as it is generated, and return it."""
    answer = ""
    for delta in llm.stream(prompt, params):
        answer += delta.text
        typer.echo(delta.text, nl=False)
        sys.stdout.flush()
    typer.echo()
    return answer


def log_warnings(settings: Settings) -> None:
    """Log warnings and errors only, as log messages would mix with the text; less if the settings say so."""
    level = logging.getLevelName(settings.server.log_level.upper())
    logging.basicConfig(level=max(level, logging.WARNING))
