"""`streamserve profile`: measure a model and its draft model on this machine."""

from streamserve.cli.flags import Config, Flags, Model, PrintConfig, settings_for, with_flags
from streamserve.cli.help import setting_groups
from streamserve.settings.commands import other_options


@with_flags(setting_groups("profile"), other_options("profile"))
def profile(
    model: Model = None, *, config: Config = None, print_config: PrintConfig = False, flags: Flags
) -> None:
    """Measure a model's step times on this machine.

    Also measures the step times of the draft model, and the throughput of memory and matrix products. Takes
    seconds for a small model, and stores the result in ~/.cache/streamserve/profiles. Servers use this
    profile to estimate the cost of speculation, and to compare step times with their lower bound (`/metrics`,
    log). A server without a profile measures a coarse one when it first loads a model.
    """
    settings = settings_for("profile", model, flags, config, print_config)
    from streamserve.cli.run_profile import run

    run(settings)
