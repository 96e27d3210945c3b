"""Settings of a server with several models: settings of all models, and for each model the table
[models.NAME]."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.settings.adapters import adapter_paths
from streamserve.settings.checkpoints import expanded
from streamserve.settings.options import Settings, SettingsError, convert
from streamserve.settings.resolve import (
    DEFAULT_MODEL,
    Given,
    gather,
    refuse_second_model,
    settings_of,
    to_toml,
)
from streamserve.settings.server_config import ServerConfig

OF_MODELS = frozenset(
    {
        "model", "served_model_name", "lora", "idle_unload", "max_requests", "max_waiting_tokens",
        "chat_template", "trust_request_chat_template", "tool_parser", "reasoning_parser",
        "special_tokens_in_messages", "max_grammar_bytes", "grammar_timeout", "stuck_after", "workers",
        "pairs", "max_workers", "prefill", "decode", "prefill_max_num_seqs", "prefill_max_num_batched_tokens",
        "prefill_max_chunk", "decode_max_num_seqs", "decode_max_num_batched_tokens", "decode_max_chunk",
        "router", "continue_tokens", "kv_transport", "kv_bytes_per_second",
    }
    | (set(ModelConfig.__struct_fields__) - {"path"})
)  # fmt: skip
"""Settings that may be in a model's table. All others are settings of the whole server."""

ON_DEMAND = ("models_memory_bytes", "idle_unload")
"""Settings with which even a single model is loaded on demand."""

_NAMED = re.compile(r"(?P<names>[\w.:/@-]+(?:,[\w.:/@-]+)*)=(?P<model>.+)")


@dataclass(frozen=True)
class ServedModels:
    """The models of a server; the first is the default. With `on_demand`, a model is loaded when a request
    needs it, and may be unloaded later. Otherwise there is one model, which is always loaded."""

    models: tuple[Settings, ...]
    on_demand: bool

    @property
    def first(self) -> Settings:
        """The default model. Settings of the whole server are read from its `server` settings."""
        return self.models[0]


@dataclass(frozen=True)
class _Named:
    """A model as given, and the names under which it is served; without names, it is served under `model`."""

    model: str
    names: tuple[str, ...] = ()


def resolve_served(
    models: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    config: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServedModels:
    """Resolve the settings of a server. It serves `models`, each given as MODEL or NAME[,NAME…]=MODEL, and
    the models that have a table in the file `config`. `resolve` describes the other arguments.

    A model's table takes precedence over the settings of all models. Raises SettingsError for invalid values,
    CheckpointError if a model is not found.
    """
    given = gather(overrides, config, environ)
    refuse_second_model(models, given)
    named = _all_models(models, given)
    on_demand = len(named) > 1 or any(
        values.get(name) is not None
        for values in (given.values, *given.tables.values())
        for name in ON_DEMAND
    )
    _check_common(given.values, len(named), on_demand)
    settings = tuple(_settings_with_table(each, given, len(named) > 1) for each in named)
    _check_names(settings)
    return ServedModels(settings, on_demand)


def _all_models(models: Sequence[str], given: Given) -> list[_Named]:
    """Return the given models, then the models of the remaining tables."""
    setting = given.values.get("model")
    if setting is not None and not isinstance(setting, str):
        raise SettingsError(f"model must be a name or a folder, got {setting!r}")
    named = [_named(text) for text in models or ([setting] if setting else [])]
    known = {name for each in named for name in (each.names or (each.model,))}
    for name, table in given.tables.items():
        if name in known:
            if "model" in table:
                raise SettingsError(
                    f"models.{name}: model is given in {given.config} and outside of it: leave one of "
                    "them out"
                )
        elif not isinstance(table.get("model"), str):
            raise SettingsError(
                f"models.{name} (in {given.config}): model is missing: give a name or a folder"
            )
        else:
            named.append(_Named(table["model"], (name,)))
    return named or [_Named(DEFAULT_MODEL)]


def _named(text: str) -> _Named:
    """Parse NAME=MODEL or MODEL. A path that exists is always a MODEL."""
    match = _NAMED.fullmatch(text)
    if match is None or expanded(text).exists():
        return _Named(text)
    return _Named(match["model"], tuple(match["names"].split(",")))


def _check_common(values: Mapping[str, Any], models: int, on_demand: bool) -> None:
    """Check settings that several models, or models loaded on demand, cannot have. Raises SettingsError."""
    if models > 1 and values.get("served_model_name"):
        raise SettingsError(
            "served_model_name: with several models give NAME=MODEL, or set it in each model's table "
            "[models.NAME]"
        )
    if models > 1 and values.get("lora"):
        raise SettingsError(
            "lora: with several models, give the adapters of each model in its table [models.MODEL]: lora "
            '= ["NAME=PATH"]'
        )
    if models > 1 and values.get("launcher", "local") != "local":
        raise SettingsError(
            f"launcher = {values['launcher']!r}: machines can only join a server of one model: start a "
            "server for each model"
        )
    if on_demand and values.get("timeline"):
        raise SettingsError(
            "timeline: a timeline is only written for one model that stays loaded: leave timeline out"
        )
    for name in ("load_timeout", "memory_timeout"):
        if not on_demand and values.get(name) is not None:
            raise SettingsError(f"{name}: a single model is loaded on demand only with idle_unload")


def _settings_with_table(named: _Named, given: Given, shared: bool) -> Settings:
    """Return the settings of one model. Raises SettingsError; the message says if the model's table is the
    cause: without the table, the same error does not occur."""
    own = [name for name in named.names or (named.model,) if name in given.tables]
    if len(own) > 1:
        raise SettingsError(
            f"{','.join(named.names)}: one model has several tables, under these names: leave only one table"
        )
    table = given.tables[own[0]] if own else {}
    try:
        return _settings(named, given.values, table, shared)
    except SettingsError as error:
        if not own or str(error) == _refusal_without_table(named, given.values, shared):
            raise
        raise SettingsError(f"[models.{own[0]}] in {given.config}: {error}") from None


def _refusal_without_table(named: _Named, common: Mapping[str, Any], shared: bool) -> str | None:
    """Return why the settings of one model are refused without its table; None if they are not."""
    try:
        _settings(named, common, {}, shared)
    except SettingsError as error:
        return str(error)
    except CheckpointError:
        pass  # the draft model was not found: the table gives another one
    return None


def _settings(named: _Named, common: Mapping[str, Any], table: Mapping[str, Any], shared: bool) -> Settings:
    """Return the settings of one model. Raises SettingsError naming a setting that is not allowed in its
    table."""
    for name in table:
        if name not in OF_MODELS:
            raise SettingsError(f"{name} is a setting of the whole server: give it outside of the table")
    values = {**common, **table}
    others = convert({"served_model_name": values.get("served_model_name", ())}, ServerConfig)
    values["served_model_name"] = tuple(dict.fromkeys((*named.names, *others.served_model_name)))
    return settings_of(named.model, values, shared)


def served_names(settings: Settings) -> tuple[str, ...]:
    """Return the names of a model in the API."""
    return settings.server.served_model_name or (settings.name,)


def _check_names(models: Sequence[Settings]) -> None:
    """Raise SettingsError if two models or LoRA adapters have the same name."""
    seen: set[str] = set()
    for settings in models:
        names, adapters = served_names(settings), adapter_paths(settings.server.lora)
        for name in (*names, *adapters):
            if name in seen and name in adapters:
                raise SettingsError(f"lora = {name!r} of {names[0]}: another model or adapter has this name")
            if name in seen:
                raise SettingsError(
                    f"two models have the name {name!r}: give one of them another name with NAME=MODEL"
                )
            seen.add(name)


def served_to_toml(served: ServedModels) -> str:
    """Return the settings as TOML. `--config` reads it back to the same settings."""
    if len(served.models) == 1:
        return to_toml(served.first)
    common = msgspec.to_builtins(served.first.server)
    shared = {name: value for name, value in common.items() if name not in OF_MODELS}
    text = _lines(shared)
    for settings in served.models:
        names = served_names(settings)
        values = {**msgspec.to_builtins(settings.server), **msgspec.to_builtins(settings.model)}
        own = {name: value for name, value in values.items() if name in OF_MODELS}
        own |= {"model": settings.name, "served_model_name": names}
        text += f"\n[models.{json.dumps(names[0])}]\n{_lines(own)}"
    return text


def _lines(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items() if value is not None)
