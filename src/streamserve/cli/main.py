"""The command line. Exit status 2 means an invalid setting or checkpoint, 130 an interrupt by Ctrl-C."""

import asyncio
import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from streamserve import __version__
from streamserve.bench.command import bench
from streamserve.protocol.config import LogLevel
from streamserve.protocol.curve import KeyPair, read_key_pair, write_key_pair
from streamserve.protocol.errors import CheckpointError, FleetError, RequestError, StartError
from streamserve.protocol.sampling import SamplingParams
from streamserve.protocol.stop_signals import INTERRUPTED
from streamserve.settings.checkpoints import locate
from streamserve.settings.draft import DraftSettings, draft_options, resolve_draft
from streamserve.settings.resolve import Settings, SettingsError, options, resolve, to_toml

app = typer.Typer(
    help="Serve Llama-family models with OpenAI's API, or run them in the terminal.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

models = typer.Typer(help="Create checkpoints for benchmarks.", no_args_is_help=True)
app.add_typer(models, name="models")
keys = typer.Typer(help="Create and show keys for draft services.", no_args_is_help=True)
app.add_typer(keys, name="keys")
app.add_typer(bench, name="bench")

Model = Annotated[
    str | None,
    typer.Argument(
        help="a checkpoint folder, a Hugging Face hub name (owner/model), or `embedded`, the packaged model"
    ),
]
ModelOption = Annotated[
    str | None, typer.Option(help="the model, as for `streamserve serve`; by default `embedded`")
]
MaxTokens = Annotated[int, typer.Option(help="maximum number of tokens to generate")]
Temperature = Annotated[float, typer.Option(help="sampling temperature; 0: always the likeliest token")]
TopP = Annotated[float, typer.Option(help="sample from the likeliest tokens with this total probability")]
Seed = Annotated[int | None, typer.Option(help="seed for sampling; the same seed gives the same text")]
Config = Annotated[str | None, typer.Option(help="TOML file with settings", metavar="FILE")]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="print the resolved settings as TOML and exit")
]


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `model` and `settings` one flag for each setting (protocol/config.py), and
    --config and --print-config.

    Settings without a flag come from STREAMSERVE_* and the configuration file.
    """
    names = [option.name for option in options()]

    @wraps(command)
    def run(model: str | None, config: str | None, print_config: bool, **values: Any) -> None:
        flags = {name: values.pop(name) for name in names}
        with exit_on_error():
            settings = resolve(model, {name: flag for name, flag in flags.items() if flag != []}, config)
            if print_config:
                typer.echo(to_toml(settings), nl=False)
            else:
                command(model=model, settings=settings, **values)

    parameters = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
    parameters += [_parameter("config", Config, None), _parameter("print_config", PrintConfig, False)]
    parameters += [_flag(option.name, option.kind, option.help, option.default) for option in options()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn errors that are meant for the user into one line and an exit status."""
    try:
        yield
    except (SettingsError, CheckpointError) as error:
        raise SystemExit(_print_error(error, 2)) from error
    except (StartError, FleetError, RequestError, OSError) as error:
        raise SystemExit(_print_error(error, 1)) from error
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag(name: str, kind: type, description: str, default: Any) -> inspect.Parameter:
    dashed = name.replace("_", "-")
    names = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
    shown = f" (default: {default})" if default not in (None, (), "") else ""
    option = typer.Option(names, help=description + shown, show_default=False, rich_help_panel="Settings")
    return _parameter(name, Annotated[list[str] | None if kind is list else kind | None, option], None)


def _print_error(error: Exception, status: int) -> int:
    typer.secho(f"streamserve: {error}", fg="red", err=True)
    return status


@app.command()
@with_settings
def serve(model: Model = None, *, settings: Settings) -> None:
    """Serve a model over HTTP with OpenAI's API.

    Every setting is also an environment variable (STREAMSERVE_PORT=9000) and a line of a TOML file (port =
    9000, given by --config or STREAMSERVE_CONFIG). Flags override variables, and variables override the file.
    """
    from streamserve.cli.serve import run

    run(settings)


@app.command()
@with_settings
def generate(
    prompt: Annotated[str, typer.Argument(help="the text to continue; - reads standard input")],
    *,
    model: ModelOption = None,
    settings: Settings,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="continue the text without the chat template")] = False,
) -> None:
    """Print a model's answer to PROMPT."""
    from streamserve.llm.llm import LLM

    _log_warnings(settings)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    with LLM.from_settings(settings) as llm:
        prompt_text = text if raw or not llm.tokenizer.chat_template else llm.render([_user_message(text)])
        _print_stream(llm, prompt_text, params)


@app.command()
@with_settings
def chat(
    model: Model = None,
    *,
    settings: Settings,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
) -> None:
    """Chat with a model in the terminal. An empty line, Ctrl-D or Ctrl-C exits."""
    from streamserve.llm.llm import LLM

    _log_warnings(settings)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    messages = [{"role": "system", "content": system}] if system else []
    with LLM.from_settings(settings) as llm, contextlib.suppress(EOFError, KeyboardInterrupt):
        while text := input("> ").strip():
            messages.append(_user_message(text))
            answer = _print_stream(llm, llm.render(messages), params)
            messages.append({"role": "assistant", "content": answer})


@app.command()
@with_settings
def profile(model: Model = None, *, settings: Settings) -> None:
    """Measure step times of a model and its draft model on this machine, and memory and matrix throughput.

    Takes seconds for a small model, and stores the result in ~/.cache/streamserve/profiles. It is used to
    estimate the cost of speculation, and to compare step times with their lower bound (`/metrics`, log). A
    server without a profile measures a coarse one when it first loads a model.
    """
    from streamserve.cli.profile import run

    run(settings)


def with_draft_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `model` and `settings` one flag for each setting of a draft service."""

    @wraps(command)
    def run(model: str | None, explain: bool, log_level: LogLevel, **flags: Any) -> None:
        with exit_on_error():
            settings = resolve_draft(model, {name: flag for name, flag in flags.items() if flag != []})
            command(model=model, explain=explain, log_level=log_level, settings=settings)

    parameters = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
    parameters += [_flag(option.name, option.kind, option.help, option.default) for option in draft_options()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


@app.command()
@with_draft_settings
def draft(
    model: Annotated[
        str | None,
        typer.Argument(help="the draft model, as for `streamserve serve`; by default `embedded-draft`"),
    ] = None,
    *,
    settings: DraftSettings,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="print measured values next to the predictions of the performance model, every 2 seconds",
        ),
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="minimum level of log messages")] = "info",
) -> None:
    """Draft tokens for many target servers with one draft model.

    Target servers use it with --draft tcp://HOST:PORT.
    """
    from streamserve.cli.draft import run

    run(settings, explain, log_level)


@keys.command("new")
def new_key(file: Annotated[Path, typer.Argument(help="file to write; must not exist")]) -> None:
    """Create a key for a draft service or a target server, and print its public key.

    The service is started with --key FILE and --clients LIST, where LIST has the target servers' public
    keys, one per line, each followed by a name. A target server is started with --draft-key FILE and
    --draft tcp://SERVICEKEY@HOST:PORT.
    """
    import zmq
    from zmq.utils import z85

    with exit_on_error():
        public, secret = (z85.decode(half) for half in zmq.curve_keypair())
        write_key_pair(file, KeyPair(public, secret))
    typer.echo(public.hex())


@keys.command("show")
def show_key(file: Annotated[Path, typer.Argument(help="a key file")]) -> None:
    """Print the public key of a key file."""
    with exit_on_error():
        try:
            typer.echo(read_key_pair(file).public.hex())
        except ValueError as error:
            raise SettingsError(str(error)) from None


@models.command("inflate")
def inflate_model(
    source: Annotated[str, typer.Argument(help="a Llama checkpoint: folder, hub name, or `embedded`")],
    out: Annotated[Path, typer.Argument(help="folder to write; must not exist or be empty")],
    *,
    hidden: Annotated[int, typer.Option(help="hidden size: that of SOURCE, times a power of four")],
    layers: Annotated[int, typer.Option(help="number of layers, at least that of SOURCE")],
    heads: Annotated[
        int | None, typer.Option(help="number of attention heads; by default scaled like the hidden size")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="number of key-value heads; by default scaled like the hidden size")
    ] = None,
    intermediate: Annotated[
        int | None, typer.Option(help="intermediate size of the MLP; by default scaled like the hidden size")
    ] = None,
) -> None:
    """Write a larger checkpoint that computes exactly the same function at the larger model's cost.

    For benchmarks: it generates the same text as SOURCE, and a step takes as long as with any model of its
    shape.
    """
    from streamserve.execution.inflate import Shape, inflate

    with exit_on_error():
        inflate(locate(source), out, Shape(hidden, layers, heads, kv_heads, intermediate))
    typer.echo(f"{out}: {sum(file.stat().st_size for file in out.iterdir()) / 1e6:.0f} MB")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _print_stream(llm: Any, prompt: str | list[int], params: SamplingParams) -> str:
    answer = ""
    for delta in llm.stream(prompt, params):
        answer += delta.text
        typer.echo(delta.text, nl=False)
        sys.stdout.flush()
    typer.echo()
    return answer


def _log_warnings(settings: Settings) -> None:
    level = logging.getLevelName(settings.server.log_level.upper())
    logging.basicConfig(level=max(level, logging.WARNING))


def main() -> None:
    """Entry point of the `streamserve` command."""
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        app()
