"""The table of habits, and the settings that given values mean."""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from streamserve.settings.habits import llama_cpp, vllm
from streamserve.settings.habits.habit import Habit, Program, Refusal, key_of, spelled
from streamserve.settings.options import SettingsError

HABITS: tuple[Habit, ...] = (
    *vllm.TAKEN, *llama_cpp.TAKEN, *vllm.INSTEAD, *llama_cpp.INSTEAD, *vllm.IDLE, *llama_cpp.IDLE,
    *vllm.REFUSED, *llama_cpp.REFUSED, *llama_cpp.OLLAMA,
)  # fmt: skip

SAME: dict[Program, tuple[str, ...]] = {
    "vllm": (
        "host", "port", "api_key", "served_model_name", "max_num_seqs", "max_num_batched_tokens",
        "tensor_parallel_size", "device", "block_size", "enable_prefix_caching", "swap_space", "max_loras",
        "max_lora_rank", "chat_template", "trust_request_chat_template", "ssl_certfile", "ssl_keyfile",
        "otlp_traces_endpoint",
    ),
    "sglang": (
        "host", "port", "api_key", "served_model_name", "dtype", "device", "ssl_certfile", "ssl_keyfile",
        "max_lora_rank", "chat_template", "log_level",
    ),
    "llama.cpp": ("host", "port", "api_key", "api_key_file", "threads"),
    "ollama": (),
}  # fmt: skip
"""Settings with the same name and meaning in another program."""


_SECRET = ("--hf-token", "hf_token")


@dataclass(frozen=True)
class Adopted:
    """The settings that given values mean, and a warning for each value without effect."""

    settings: dict[str, Any]
    warnings: tuple[str, ...]


@cache
def habits_by_name() -> Mapping[str, Habit]:
    """Return every habit by its names as flags, and as names of settings."""
    named: dict[str, Habit] = {}
    for habit in HABITS:
        named |= {name: habit for spelling in habit.names for name in (spelling, key_of(spelling)) if name}
    return named


def adopt(given: Mapping[str, Any], under: Mapping[str, Any] | None = None) -> Adopted:
    """Return the settings that `given` values mean: values of settings, and of habits by their names, which
    are flags as typed or names of settings. None counts as not given. `under` are the settings of sources of
    lower precedence: a habit may depend on what else is set.

    Raises SettingsError for a habit that is refused, naming what to use, and for a setting that is given
    under two names.
    """
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    warnings: list[str] = []
    values = {name: value for name, value in given.items() if value is not None}
    known = ChainMap(values, dict(under or {}))
    for name, value in values.items():
        habit = habits_by_name().get(name)
        meant = {name: value} if habit is None else _meant(habit, name, value, known, warnings)
        for setting, each in meant.items():
            if setting in settings and settings[setting] != each:
                raise SettingsError(
                    f"{sources[setting]} and {name} both set {setting}: give only one of them"
                )
            settings[setting], sources[setting] = each, name
    return Adopted(settings, tuple(warnings))


def _meant(
    habit: Habit, name: str, value: Any, given: ChainMap[str, Any], warnings: list[str]
) -> Mapping[str, Any]:
    """Return the settings that a value of a habit means, and append warnings about what has no effect."""
    if any(value == quiet and type(value) is type(quiet) for quiet in habit.quiet):
        return {}
    as_flags = name.startswith("-")
    if habit.convert is not None:
        try:
            meaning = habit.convert(value, given)
        except Refusal as refusal:
            raise SettingsError(f"{_shown(name, value)}: {spelled(str(refusal), as_flags)}") from None
        warnings += (f"{_shown(name, value)}: {spelled(text, as_flags)}" for text in meaning.idle)
        return meaning.settings
    if habit.kind == "idle" and not any(value is refused for refused in habit.refused):
        warnings.append(f"{_shown(name, value)}: without effect: {spelled(habit.here, as_flags)}")
        return {}
    raise SettingsError(f"{_shown(name, value)}: {spelled(habit.here, as_flags)}")


def _shown(name: str, value: Any) -> str:
    """Return a name and its value as they were given; the name alone if the value is secret."""
    if name in _SECRET:
        return name
    if not name.startswith("-"):
        return f"{name} = {value!r:.80}"
    if isinstance(value, bool):
        return name if value else f"--no-{name.removeprefix('--')}"
    return f"{name} {value:.80}" if isinstance(value, str) else name
