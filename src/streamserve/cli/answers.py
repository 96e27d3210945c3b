"""Answers in the terminal: sampling options, and printing of text while it is generated."""

import logging
import sys
from collections.abc import Iterable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from streamserve.protocol.field_errors import InvalidField
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.adapters import adapter_paths
from streamserve.settings.options import Settings, SettingsError

if TYPE_CHECKING:
    from streamserve.llm.llm import LLM

MaxTokens = Annotated[
    int, typer.Option(help="maximum number of tokens to generate, within the model's context")
]
Temperature = Annotated[float, typer.Option(help="sampling temperature; 0: always the likeliest token")]
TopP = Annotated[float, typer.Option(help="sample from the likeliest tokens with this total probability")]
Seed = Annotated[int | None, typer.Option(help="seed for sampling; the same seed gives the same text")]


def user_message(text: str) -> dict[str, str]:
    """Return a chat message of the user."""
    return {"role": "user", "content": text}


def sampling_params(max_tokens: int, temperature: float, top_p: float, seed: int | None) -> SamplingParams:
    """Return the sampling parameters from the flags. Raises SettingsError for a value out of range, before a
    model is loaded."""
    try:
        return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    except InvalidField as error:
        raise SettingsError(error.message(f"--{error.field.replace('_', '-')}")) from error


def only_adapter(settings: Settings) -> str:
    """Return the name of the LoRA adapter that answers; "" if there is none. Raises SettingsError if there
    are several."""
    names = list(adapter_paths(settings.server.lora))
    if len(names) > 1:
        raise SettingsError(
            f"lora: this command uses one adapter, but there are {', '.join(names)}: give only one"
        )
    return names[0] if names else ""


def print_stream(llm: "LLM", prompt: str | list[int], params: SamplingParams, adapter: str) -> str:
    """Print the text as it is generated, and return it. `adapter` is the name of a LoRA adapter, or ""."""
    params = _within_context(llm, prompt, params)
    return _print_all(delta.text for delta in llm.stream(prompt, params, lora=adapter))


def print_until_interrupt(llm: "LLM", prompt: str | list[int], params: SamplingParams, adapter: str) -> str:
    """Print the text as it is generated, until its end or Ctrl-C. Return the text that was printed."""
    printed: list[str] = []
    params = _within_context(llm, prompt, params)
    with closing(llm.stream(prompt, params, lora=adapter)) as deltas, suppress(KeyboardInterrupt):
        _print_all((delta.text for delta in deltas), printed)
        return "".join(printed)
    typer.echo()
    return "".join(printed)


def _within_context(llm: "LLM", prompt: str | list[int], params: SamplingParams) -> SamplingParams:
    """Return `params` with at most the tokens that the model's context leaves after the prompt, if it leaves
    any: `--max-tokens` is a maximum, as it is for the server's clients."""
    try:
        tokens = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    except UnicodeEncodeError:  # which the request's error explains
        return params
    left = llm.model.max_model_len - len(tokens)
    if params.max_tokens is None or not 0 < left < params.max_tokens:
        return params
    return msgspec.structs.replace(params, max_tokens=left)


def _print_all(texts: Iterable[str], printed: list[str] | None = None) -> str:
    """Print texts as they arrive, append them to `printed`, and return them joined."""
    printed = [] if printed is None else printed
    for text in texts:
        printed.append(text)
        typer.echo(text, nl=False)
        sys.stdout.flush()
    typer.echo()
    return "".join(printed)


def log_warnings(settings: Settings) -> None:
    """Log only warnings and errors, because other log messages would mix with the text. Log less if the
    settings say so."""
    level = logging.getLevelName(settings.server.log_level.upper())
    logging.basicConfig(level=max(level, logging.WARNING))
