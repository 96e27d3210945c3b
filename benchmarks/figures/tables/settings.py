"""The settings that need others, from the rules that refuse them."""

from streamserve.settings.effects import NEEDS, Need

from .base import TABLES, markdown


def _needs(up: str) -> str:
    return markdown(
        ["settings", "have an effect only with"], [[_settings(need), need.needed] for need in NEEDS]
    )


def _settings(need: Need) -> str:
    values = [f" {value}" for value in need.values] or [""]
    flags = [f"`--{name.replace('_', '-')}{value}`" for name in need.settings for value in values]
    return ", ".join(flags)


TABLES["settings/needs"] = _needs
