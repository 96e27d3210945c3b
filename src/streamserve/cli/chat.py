"""`streamserve chat`: a conversation in the terminal."""

import contextlib
import sys
from typing import Annotated

import typer

from streamserve.cli.answers import (
    MaxTokens,
    Seed,
    Temperature,
    TopP,
    log_warnings,
    only_adapter,
    print_until_interrupt,
    sampling_params,
    user_message,
)
from streamserve.cli.flags import Config, Flags, Model, PrintConfig, settings_for, with_flags
from streamserve.cli.help import setting_groups
from streamserve.settings.commands import other_options

HELP = """\
/clear  begin a new conversation, with the same system message
/help   show this text
Ctrl-C ends an answer. An empty line, Ctrl-D or another Ctrl-C exits."""


@with_flags(setting_groups("llm"), other_options("llm"))
def chat(
    model: Model = None,
    *,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    config: Config = None,
    print_config: PrintConfig = False,
    flags: Flags,
) -> None:
    """Chat with a model in the terminal. Ctrl-C ends an answer; an empty line, Ctrl-D or another Ctrl-C
    exits. /help lists the commands."""
    params = sampling_params(max_tokens, temperature, top_p, seed)
    settings = settings_for("llm", model, flags, config, print_config)
    adapter = only_adapter(settings)
    from streamserve.llm.llm import LLM

    log_warnings(settings)
    beginning = [{"role": "system", "content": system}] if system else []
    messages = [*beginning]
    if sys.stdin.isatty():
        typer.echo("/help lists the commands", err=True)
    with LLM.from_settings(settings) as llm, contextlib.suppress(EOFError, KeyboardInterrupt):
        while text := input("> ").strip():
            if text == "/help":
                typer.echo(HELP)
                continue
            if text == "/clear":
                messages = [*beginning]
                continue
            messages.append(user_message(text))
            answer = print_until_interrupt(llm, llm.render(messages), params, adapter)
            messages.append({"role": "assistant", "content": answer})
