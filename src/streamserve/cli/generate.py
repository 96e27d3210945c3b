"""`streamserve generate`: print a model's answer to one prompt."""

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
    print_stream,
    sampling_params,
    user_message,
)
from streamserve.cli.flags import Config, Flags, PrintConfig, settings_for, with_flags
from streamserve.cli.help import setting_groups
from streamserve.settings.commands import other_options

Model = Annotated[
    str | None, typer.Option(help="the model, as for `streamserve serve`; by default `embedded`")
]


@with_flags(setting_groups("llm"), other_options("llm"))
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="the text to continue; - reads standard input")
    ],
    *,
    model: Model = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="continue the text without the chat template")] = False,
    config: Config = None,
    print_config: PrintConfig = False,
    flags: Flags,
) -> None:
    """Print a model's answer to PROMPT."""
    params = sampling_params(max_tokens, temperature, top_p, seed)
    settings = settings_for("llm", model, flags, config, print_config)
    adapter = only_adapter(settings)
    from streamserve.llm.llm import LLM

    log_warnings(settings)
    text = sys.stdin.read() if prompt == "-" else prompt
    with LLM.from_settings(settings) as llm:
        prompt_text = text if raw or not llm.tokenizer.renderer() else llm.render([user_message(text)])
        print_stream(llm, prompt_text, params, adapter)
