"""The layout of flags in `--help`: in groups, and with each flag's name unbroken even in 80 columns. `--help`
shows the settings that many users need, `--help-all` all of them."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from streamserve.settings.commands import Use, acting
from streamserve.settings.options import Option, options

FIRST = {
    "task": "Model and machine",
    "max_model_len": "KV cache and batches",
    "order": "Scheduling",
    "profile": "Measuring and debugging",
    "draft": "Speculative decoding",
    "host": "HTTP server",
    "lora": "LoRA adapters",
    "models_memory_bytes": "Several models",
    "max_requests": "Limits of requests",
    "max_stored_responses": "Stored responses and batches",
    "chat_template": "Templates, tools, reasoning and structured output",
    "request_timeout": "Timeouts",
    "api_key": "Keys",
    "workers": "Workers",
    "launcher": "Machines that join",
    "router": "Routing and KV transfer",
    "timeline": "Traces, logs and web pages",
}
"""The first setting of each group, in the order of the settings. A group ends before the first setting of the
next."""

COMMON = frozenset(
    {
        "dtype", "device", "tensor_parallel_size", "quantization", "threads", "max_model_len",
        "kv_cache_bytes", "max_num_seqs", "draft", "host", "port", "ssl_certfile", "ssl_keyfile",
        "served_model_name", "lora", "max_requests", "chat_template", "tool_parser", "reasoning_parser",
        "request_timeout", "api_key", "api_key_file", "workers", "pairs", "launcher", "log_level",
    }
)  # fmt: skip
"""The settings in `--help`."""

_ALL = "streamserve.help_all"


def setting_groups(use: Use = "serve") -> dict[str, list[Option]]:
    """Return the settings that have an effect in a use, by the titles of their groups."""
    groups = grouped(options(), FIRST)
    shown = {title: [each for each in group if each.name in acting(use)] for title, group in groups.items()}
    return {title: group for title, group in shown.items() if group}


def grouped(settings: list[Option], first: Mapping[str, str]) -> dict[str, list[Option]]:
    """Return `settings` by title. A setting in `first` begins the group with its title."""
    groups: dict[str, list[Option]] = {}
    title = "Settings"
    for option in settings:
        title = first.get(option.name, title)
        groups.setdefault(title, []).append(option)
    return groups


class GroupedCommand(TyperCommand):
    """A command whose help has a section for each group of flags (`rich_help_panel`)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options that are not settings, and the groups of settings."""
        sections: dict[str, list[tuple[str, str]]] = {}
        left_out = 0
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record and _is_setting(parameter) and parameter.name not in COMMON and _ALL not in ctx.meta:
                left_out += 1
            elif record:
                own = "Arguments" if parameter.param_type_name == "argument" else "Options"
                title = getattr(parameter, "rich_help_panel", None) or own
                sections.setdefault(title, []).append(record)
        own_first = sorted(sections, key=lambda title: title not in ("Arguments", "Options"))
        for title in own_first:
            with formatter.section(title):
                formatter.write_dl(sections[title])
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(f"`{ctx.command_path} --help-all` shows {left_out} further flags.")


def _is_setting(parameter: Any) -> bool:
    return getattr(parameter, "rich_help_panel", None) in FIRST.values()


def _show_all(ctx: typer.Context, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit()


HelpAll = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="show all flags and exit")
]
"""The flag that shows the help with all settings."""
