"""`streamserve generate`: print a model's answer to one prompt."""

import sys
from pathlib import Path
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
from streamserve.protocol.files import read_file
from streamserve.settings.commands import other_options
from streamserve.settings.options import SettingsError

MAX_FILE_BYTES = 64 << 20
"""Maximum size of the file in the prompt, in bytes: far more than the longest context has."""

Model = Annotated[
    str | None, typer.Option(help="the model, as for `streamserve serve`; by default `embedded`")
]


@with_flags(setting_groups("llm"), other_options("llm"))
def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="the message to answer; - reads standard input")
    ] = None,
    *,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="text file to append to PROMPT, after an empty line"),
    ] = None,
    model: Model = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="continue the text without the chat template")] = False,
    config: Config = None,
    print_config: PrintConfig = False,
    flags: Flags,
) -> None:
    """Print a model's answer to PROMPT, a file's text, or both."""
    params = sampling_params(max_tokens, temperature, top_p, seed)
    settings = settings_for("llm", model, flags, config, print_config)
    adapter = only_adapter(settings)
    text = _text(prompt, file)
    from streamserve.llm.llm import LLM

    log_warnings(settings)
    with LLM.from_settings(settings) as llm:
        prompt_text = text if raw or not llm.tokenizer.renderer() else llm.render([user_message(text)])
        print_stream(llm, prompt_text, params, adapter)


def _text(prompt: str | None, file: Path | None) -> str:
    """Return the prompt's text, with the file's text after it. Raises SettingsError if both are missing or
    the file cannot be read."""
    parts = [sys.stdin.read() if prompt == "-" else prompt or ""]
    if file:
        try:
            text = read_file(file, MAX_FILE_BYTES, patient=True).decode()
            parts.append(text.replace("\r\n", "\n").replace("\r", "\n"))
        except OSError as error:
            raise SettingsError(f"--file: {file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SettingsError(f"--file: {file} is not a text in UTF-8") from error
    if prompt is None and file is None:
        raise SettingsError("there is no prompt: give PROMPT, --file or both")
    return "\n\n".join(filter(None, parts))
