"""The command line: serve, generate, chat, version. Exit status 2 means a bad setting or checkpoint."""

import asyncio
import contextlib
import inspect
import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from streamserve import __version__
from streamserve.protocol.errors import CheckpointError, RequestError, StartError
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings import Settings, SettingsError, options, resolve, to_toml

app = typer.Typer(
    help="Serve Llama-family models behind OpenAI's API, or use them right here.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str | None,
    typer.Argument(help="a checkpoint folder, a hub name (owner/model), or `embedded`, the packaged model"),
]
MaxTokens = Annotated[int, typer.Option(help="most tokens to generate")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token; 1 samples as trained")]
TopP = Annotated[float, typer.Option(help="sample from the likeliest tokens that hold this share")]
Seed = Annotated[int | None, typer.Option(help="the same seed gives the same text")]


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one flag for each setting (protocol/config.py), --config and --print-config; it gets
    them as `settings`. What the flags leave open comes from STREAMSERVE_* and the file."""

    @wraps(command)
    def run(model: str | None, config: str | None, print_config: bool, **values: Any) -> None:
        flags = {option.name: values.pop(option.name) or None for option in options() if option.kind is list}
        flags |= {option.name: values.pop(option.name) for option in options() if option.kind is not list}
        try:
            settings = resolve(model, flags, config)
            if print_config:
                typer.echo(to_toml(settings), nl=False)
            else:
                command(settings=settings, **values)
        except (SettingsError, CheckpointError) as error:
            raise SystemExit(_complain(error, 2)) from error
        except (StartError, RequestError, OSError) as error:
            raise SystemExit(_complain(error, 1)) from error

    own = [p for name, p in inspect.signature(command).parameters.items() if name != "settings"]
    positional = [p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
    flags = [_flag(option.name, option.kind, option.help, option.default) for option in options()]
    keyword = inspect.Parameter.KEYWORD_ONLY
    extra = [
        inspect.Parameter(
            "config", keyword, default=None,
            annotation=Annotated[str | None, typer.Option(help="TOML file with settings", metavar="FILE")],
        ),
        inspect.Parameter(
            "print_config", keyword, default=False,
            annotation=Annotated[bool, typer.Option("--print-config", help="print the settings and leave")],
        ),
    ]  # fmt: skip
    keyword_own = [p for p in own if p.kind is p.KEYWORD_ONLY]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*positional, _model_parameter(positional), *keyword_own, *extra, *flags]
        if positional
        else [_model_parameter(positional), *keyword_own, *extra, *flags]
    )
    return run


def _model_parameter(positional: list[inspect.Parameter]) -> inspect.Parameter:
    """MODEL is the argument of commands that have no other, and an option of those that do."""
    if not positional:
        return inspect.Parameter(
            "model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Model
        )
    option = typer.Option(help="as for `streamserve serve`; by default `embedded`")
    return inspect.Parameter(
        "model",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )


def _flag(name: str, kind: type, description: str, default: Any) -> inspect.Parameter:
    dashed = name.replace("_", "-")
    names = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
    shown = f" (default: {default})" if default not in (None, (), "") else ""
    option = typer.Option(names, help=description + shown, show_default=False, rich_help_panel="Settings")
    wanted: Any = list[str] | None if kind is list else kind | None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[wanted, option]
    )


def _complain(error: Exception, status: int) -> int:
    typer.secho(f"streamserve: {error}", fg="red", err=True)
    return status


@app.command()
@with_settings
def serve(*, settings: Settings) -> None:
    """Serve a model over HTTP with OpenAI's API.

    Every setting is also an environment variable (STREAMSERVE_PORT=9000) and a line of a TOML file
    (port = 9000, given by --config or STREAMSERVE_CONFIG). Flags win over variables, those over the file.
    """
    from streamserve.serving import run

    run(settings)


@app.command()
@with_settings
def generate(
    prompt: Annotated[str, typer.Argument(help="the text to continue; - reads standard input")],
    *,
    settings: Settings,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="continue the text itself, without chat template")
    ] = False,
) -> None:
    """Print a model's answer to PROMPT."""
    from streamserve.llm import LLM

    _quiet(settings)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    with LLM.from_settings(settings) as llm:
        whole = text if raw or not llm.tokenizer.chat_template else llm.render([_user(text)])
        _print_stream(llm, whole, params)


@app.command()
@with_settings
def chat(
    *,
    settings: Settings,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: Annotated[str | None, typer.Option(help="what to tell the model first")] = None,
) -> None:
    """Talk with a model. An empty line, Ctrl-D or Ctrl-C leaves."""
    from streamserve.llm import LLM

    _quiet(settings)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    messages = [{"role": "system", "content": system}] if system else []
    with LLM.from_settings(settings) as llm, contextlib.suppress(EOFError, KeyboardInterrupt):
        while text := input("> ").strip():
            messages.append(_user(text))
            answer = _print_stream(llm, llm.render(messages), params)
            messages.append({"role": "assistant", "content": answer})


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _print_stream(llm: Any, prompt: str | list[int], params: SamplingParams) -> str:
    answer = ""
    for delta in llm.stream(prompt, params):
        answer += delta.text
        typer.echo(delta.text, nl=False)
        sys.stdout.flush()
    typer.echo()
    return answer


def _quiet(settings: Settings) -> None:
    level = logging.getLevelName(settings.server.log_level.upper())
    logging.basicConfig(level=max(level, logging.WARNING))


def main() -> None:
    """Entry point of the `streamserve` command."""
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        app()


if __name__ == "__main__":
    main()
