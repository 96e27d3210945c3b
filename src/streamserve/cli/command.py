"""The class of all commands: it takes flags of other programs, and refuses unknown flags by name."""

from typing import Any

from streamserve.cli.arguments import separate
from streamserve.cli.flags import FOREIGN, exit_on_error
from streamserve.cli.help import GroupedCommand


class CheckedCommand(GroupedCommand):
    """A command of `streamserve`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises SystemExit for an unknown flag."""
        if not ctx.resilient_parsing:  # a shell completes an unfinished command
            with exit_on_error():
                separated = separate(args, _declared(self.get_params(ctx)), ctx.command_path)
            ctx.meta[FOREIGN] = separated.foreign
            args = separated.own
        return super().parse_args(ctx, args)


def _declared(parameters: list[Any]) -> dict[str, bool]:
    """Return the flags of a command, and whether each takes a value."""
    return {
        flag: not getattr(parameter, "is_flag", False) and not getattr(parameter, "count", False)
        for parameter in parameters
        if parameter.param_type_name == "option"
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
