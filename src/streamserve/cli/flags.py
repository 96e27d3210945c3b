"""Code shared by the commands: flags from declared settings, and errors as one line and an exit status."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Annotated, Any

import typer

from streamserve.cli.help import HelpAll
from streamserve.protocol.errors import CheckpointError, FleetError, RequestError, StartError
from streamserve.settings.commands import Use
from streamserve.settings.options import Option, Settings, SettingsError
from streamserve.system.stop_signals import INTERRUPTED

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="a checkpoint folder, a .gguf file, a Hugging Face hub name (owner/model), or `embedded`, the "
        "packaged model",
    ),
]
Config = Annotated[str | None, typer.Option(help="TOML file with settings", metavar="FILE")]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="print the resolved settings as TOML and exit")
]
Command = Callable[..., None]
Flags = dict[str, Any]
"""The given flags: values by the names of settings, and of flags of other programs as they were typed."""

FOREIGN = "streamserve.foreign"
"""Where the context of a command has the flags of other programs."""

SHORT = {"tensor_parallel_size": "-tp"}
"""Short forms of flags, by the names of settings."""


def with_flags(
    panels: Mapping[str, Iterable[Option]], hidden: Iterable[Option] = ()
) -> Callable[[Command], Command]:
    """Return a decorator for a command that has the parameter `flags`. It adds one flag for each option to
    the command.

    `panels` are the titles in `--help` with the options under each. `hidden` options are not shown: the
    command refuses them by name. Errors of the command are printed as in `exit_on_error`.
    """
    parameters = [_parameter(option, title) for title, declared in panels.items() for option in declared]
    parameters += [_parameter(option, None) for option in hidden]
    help_all = inspect.Parameter(
        "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll
    )
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def decorate(command: Command) -> Command:
        @exit_on_error()
        @wraps(command)
        def run(**arguments: Any) -> None:
            flags = {parameter.name: arguments.pop(parameter.name) for parameter in parameters}
            del arguments[help_all.name]
            given = {name: flag for name, flag in flags.items() if flag not in (None, [])}
            foreign = arguments.pop(context.name).meta.get(FOREIGN, {})
            command(**arguments, flags=given | foreign)

        own = [each for each in inspect.signature(command).parameters.values() if each.name != "flags"]
        run.__signature__ = inspect.Signature([*own, context, help_all, *parameters])  # type: ignore[attr-defined]
        return run

    return decorate


def _parameter(option: Option, title: str | None) -> inspect.Parameter:
    """Return the parameter for an option. `title` is its section in `--help`; None: it is hidden."""
    dashed = option.name.replace("_", "-")
    names = f"--{dashed}/--no-{dashed}" if option.kind is bool else f"--{dashed}"
    shown = f" (default: {option.default})" if option.default not in (None, (), "") else ""
    flag = typer.Option(
        names,
        *filter(None, [SHORT.get(option.name)]),
        help=option.help + shown,
        show_default=False,
        rich_help_panel=title,
        hidden=title is None,
        autocompletion=_completion(option) if option.choices else None,
    )
    kind: Any = list[str] if option.kind is list else option.kind
    annotation = Annotated[kind | None, flag]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _completion(option: Option) -> Callable[[str], list[str]]:
    """Return the shell completion for an option with few values."""

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in option.choices if choice.startswith(incomplete)]

    return complete


def settings_for(
    use: Use, model: str | None, flags: Flags, config: str | None, print_config: bool
) -> Settings:
    """Resolve the settings of a command, or print them as TOML and exit.

    Settings without a flag come from STREAMSERVE_* variables and the configuration file. Raises SettingsError
    for invalid settings, typer.Exit after printing.
    """
    from streamserve.settings.resolve import resolve, to_toml

    settings = resolve(model, flags, config, use=use)
    if print_config:
        typer.echo(to_toml(settings, use), nl=False)
        raise typer.Exit()
    return settings


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn errors for the user into one line and an exit status. Raises SystemExit."""
    try:
        yield
    except (SettingsError, CheckpointError) as error:
        raise SystemExit(_print_error(error, 2)) from error
    except (StartError, FleetError, RequestError, OSError) as error:
        raise SystemExit(_print_error(error, 1)) from error
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _print_error(error: Exception, status: int) -> int:
    text = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    typer.secho(f"streamserve: {text}", fg="red", err=True)
    return status
