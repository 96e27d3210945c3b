"""Settings from flags, environment (STREAMSERVE_*) and a TOML file, in this order of precedence.

All three use the names of the fields of ModelConfig and ServerConfig, and `model` for the name of the model.
"""

import json
import logging
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from streamserve.baselines.routers import ByClass, parse_router
from streamserve.baselines.speculation import parse_policy
from streamserve.fleet.tracing.telemetry import TELEMETRY_MISSING, telemetry_installed
from streamserve.fleet.worker_state import Topology, mixed
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.curve import parse_endpoints, read_key_pair
from streamserve.protocol.draft_kind import DraftKind, draft_kind
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.files import read_file
from streamserve.settings.adapters import with_adapters
from streamserve.settings.checkpoints import locate, packaged_draft
from streamserve.settings.cluster import check_launcher
from streamserve.settings.commands import Use, acting, defaults_in, idle_text, refuse_idle, split
from streamserve.settings.effects import Configured, check_effect
from streamserve.settings.embedding import detect_task
from streamserve.settings.habits.table import adopt, habits_by_name
from streamserve.settings.key_digests import digests
from streamserve.settings.near_names import near_name
from streamserve.settings.options import SECRETS, Settings, SettingsError, convert, options
from streamserve.settings.server_config import ServerConfig
from streamserve.settings.templates import read_chat_template
from streamserve.system.instructions import KERNEL_PATH_VARIABLE, kernel_bound
from streamserve.system.nixl import NIXL_MISSING, nixl_package
from streamserve.system.tls import tls_context

PREFIX = "STREAMSERVE_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
DEFAULT_MODEL = "embedded"

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
MAX_CONFIG_BYTES = 1 << 20

_log = logging.getLogger(__name__)


def resolve(
    model: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    config: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    use: Use = "serve",
) -> Settings:
    """Resolve settings from `overrides` (flags or keyword arguments; None counts as not set), the environment
    and the file `config`. Settings of the environment and the file without effect in `use` are named in a
    warning. All three may use names of other programs (settings/habits).

    Raises SettingsError for invalid values, and for overrides without effect in `use`; CheckpointError if the
    model is not found.
    """
    given = gather(overrides, config, environ, use)
    if given.tables:
        raise SettingsError(f"models (in {given.config}): only `streamserve serve` serves several models")
    refuse_second_model(model, given)
    name = model or given.values.get("model", DEFAULT_MODEL)
    if not isinstance(name, str):
        raise SettingsError(f"model must be a name or a folder, got {name!r}")
    return settings_of(name, given.values, use=use)


@dataclass(frozen=True)
class Given:
    """Settings as they were given, by name; keys as digests. `tables` are the tables of models, by the
    model's name, in the file `config`. `flags` are the settings that were given as flags or arguments."""

    values: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, Any]]
    config: str | Path | None
    flags: Mapping[str, Any]


def refuse_second_model(model: str | Sequence[str] | None, given: Given) -> None:
    """Raise SettingsError if a model is given as an argument and by a flag of another program."""
    if model and "model" in given.flags:
        raise SettingsError(
            f"there are two models: {given.flags['model']} is given by a flag, {', '.join(_texts(model))} as "
            "an argument: leave one of them out"
        )


def gather(
    overrides: Mapping[str, Any] | None,
    config: str | Path | None,
    environ: Mapping[str, str] | None,
    use: Use = "serve",
) -> Given:
    """Return the given settings from the sources of `resolve`.

    Raises SettingsError for unknown names, and for overrides without effect in `use`; CheckpointError for an
    invalid STREAMSERVE_KERNEL_PATH.
    """
    environ = os.environ if environ is None else environ
    kernel_bound(environ)
    names = {option.name for option in options()} | {"model"}
    config = config or environ.get(CONFIG_VARIABLE)
    values: dict[str, Any] = _underscored(_from_file(config), config) if config else {}
    tables = values.pop("models", {})
    values = _adopted(values, names, f"in {config}", {})
    values |= _from_environment(environ, names, values)
    flags = _adopted(overrides or {}, names, "as a flag or argument", values)
    refuse_idle(flags, use)
    given = split(values | flags, use)
    if given.idle:
        _log.warning("%s", idle_text(given.idle, use))
    for secret in SECRETS:
        if secret in acting(use):
            given.acting[secret] = digests(secret, given.acting, environ)
    return Given(given.acting, _tables(tables, names, config, values | flags), config, flags)


def _tables(
    tables: Any, names: set[str], config: str | Path | None, common: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the tables of models with underscored names. `common` are the settings of all models. Raises
    SettingsError if one is not a table of settings."""
    named: dict[str, dict[str, Any]] = {}
    for model, table in tables.items() if isinstance(tables, dict) else [("", tables)]:
        if not isinstance(table, dict):
            raise SettingsError(f"models (in {config}) must be tables: [models.NAME]")
        where = f"in [models.{model}] of {config}"
        named[model] = _adopted(_underscored(table, where.removeprefix("in ")), names, where, common)
    return named


def settings_of(name: str, values: Mapping[str, Any], shared: bool = False, use: Use = "serve") -> Settings:
    """Return the settings of the model `name` from `values`. `shared`: it is one of several models of a
    server. Raises SettingsError and CheckpointError as `resolve` does."""
    server = convert({**defaults_in(use), **values}, ServerConfig)
    unresolved = convert({**values, "path": ""}, ModelConfig)
    folder = locate(name)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json: give the folder that contains it")
    task = detect_task(folder) if unresolved.task == "auto" else unresolved.task
    unresolved = msgspec.structs.replace(unresolved, task=task)
    model_config = msgspec.structs.replace(unresolved, path=str(folder), draft=_draft(unresolved, folder))
    _check_addresses(server)
    _check_names(server)
    _check_tls(server)
    read_chat_template(server.chat_template)
    _check_policy(unresolved.speculation_policy)
    _check_router(server.router)
    check_effect(Configured(model_config, server, topology(server), shared, use))
    _check_topology(server, unresolved.profile)
    check_launcher(server, model_config)
    model_config = with_adapters(model_config, server, name)
    if server.otlp_traces_endpoint and not telemetry_installed():
        raise SettingsError(f"otlp_traces_endpoint: {TELEMETRY_MISSING}")
    return Settings(name, model_config, server)


def _draft(config: ModelConfig, target: Path) -> str:
    """Return the drafter as given, or the folder of a draft model; "none" if `auto` finds none."""
    draft, kind = config.draft, draft_kind(config.draft)
    # Tensor parallelism does not support draft models: see execution/loading/device.py.
    divided = config.tensor_parallel_size > 1
    if kind is DraftKind.AUTO:
        useless = config.task != "generate" or config.speculation_policy == "off" or divided
        return "none" if useless else str(packaged_draft(target) or "none")
    if kind is DraftKind.SERVICE:
        _check_services(config)
        return draft
    return str(locate(draft)) if kind is DraftKind.MODEL else draft


def _check_services(config: ModelConfig) -> None:
    """Check the settings of draft services.

    Services receive prompts, so both sides need keys if they are on different machines.
    """
    try:
        endpoints = parse_endpoints(config.draft)
        if config.draft_key:
            read_key_pair(config.draft_key)
    except ValueError as error:
        raise SettingsError(f"draft: {error}") from None
    if config.speculation_mode == "rejection":
        raise SettingsError("speculation_mode = 'rejection': draft services only support 'coupled'")
    for endpoint in endpoints:
        if endpoint.server_key and not config.draft_key:
            raise SettingsError(
                f"draft = {config.draft!r}: a service with a key requires a client key: give draft_key"
            )
        if not endpoint.server_key and not endpoint.loopback:
            raise SettingsError(
                f"draft: {endpoint.address} is on another machine, which requires keys: give "
                "tcp://SERVERKEY@HOST:PORT and draft_key"
            )


def _check_addresses(server: ServerConfig) -> None:
    for origin in server.cors_origin:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise SettingsError(
                f"cors_origin = {origin!r}: must be * or an origin without a path: https://app.example"
            )
    endpoint = server.otlp_traces_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise SettingsError(f"otlp_traces_endpoint = {endpoint!r}: must be a URL with http:// or https://")


def _check_names(server: ServerConfig) -> None:
    if not all(name.strip() for name in server.served_model_name):
        raise SettingsError("served_model_name: a name is empty, so no request could use it")


def _check_tls(server: ServerConfig) -> None:
    """Check the files for HTTPS, so that a server with wrong files ends before it loads a model."""
    if server.ssl_certfile:
        try:
            tls_context(server.ssl_certfile, server.ssl_keyfile)
        except ValueError as error:
            raise SettingsError(str(error)) from None


def _check_policy(policy: str) -> None:
    try:
        parse_policy(policy)
    except ValueError as error:
        raise SettingsError(f"speculation_policy = {policy!r}: {error}") from None


def _check_router(router: str) -> None:
    try:
        parse_router(router)
    except ValueError as error:
        raise SettingsError(f"router = {router!r}: {error}") from None


def topology(server: ServerConfig) -> Topology:
    """Return the workers that the settings ask for. Raises SettingsError if the settings contradict each
    other."""
    if server.pairs and (server.prefill or server.decode):
        raise SettingsError(
            "pairs and prefill/decode exclude each other: give either pairs, or prefill and decode"
        )
    if bool(server.prefill) != bool(server.decode):
        raise SettingsError("prefill and decode need each other: give both, or pairs")
    prefill, decode = server.prefill or server.pairs, server.decode or server.pairs
    unified = (0 if prefill else 1) if server.workers is None else server.workers
    if not unified and not prefill:
        raise SettingsError("workers = 0: no worker is left: give workers, pairs, or prefill and decode")
    return mixed(unified, prefill, decode)


def worker_bound(server: ServerConfig) -> int:
    """Return the maximum number of workers at once."""
    return max(len(topology(server).names), server.max_workers or 0)


def _check_topology(server: ServerConfig, profile: bool) -> None:
    if server.kv_transport == "nixl" and nixl_package() is None:
        raise SettingsError(f"kv_transport = 'nixl': {NIXL_MISSING}")
    if server.router == "predictive" and not profile:
        raise SettingsError("router = 'predictive' needs measured step times: enable profile")
    workers = topology(server)
    if server.max_workers is not None and server.max_workers < len(workers.names):
        raise SettingsError(
            f"max_workers = {server.max_workers}: the server starts with {len(workers.names)} workers: "
            "raise max_workers"
        )
    check_router(server.router, workers)


def check_router(name: str, workers: Topology) -> None:
    """Raise SettingsError if a router cannot place requests on these workers."""
    router = parse_router(name)
    sizes = sum(router.sizes) if isinstance(router, ByClass) else 0
    decode = len(workers.decode)
    if sizes and sizes != decode:
        raise SettingsError(
            f"router = {name!r}: its classes have {sizes} decode workers, but there are {decode}: set "
            f"decode or pairs to {sizes}"
        )
    if isinstance(router, ByClass) and workers.unified and workers.prefill and (sizes or not workers.paired):
        raise SettingsError(
            f"router = {name!r}: classes cannot be divided among unified workers and pools: use only "
            "unified workers, only pools, or classes without sizes and equal numbers of prefill and "
            "decode workers"
        )


def to_toml(settings: Settings, use: Use = "serve") -> str:
    """Return the settings with an effect in `use` as TOML. `--config` reads it back to the same settings."""
    values: dict[str, Any] = {"model": settings.name}
    for struct in (settings.model, settings.server):
        values |= msgspec.to_builtins(struct)
    names = acting(use) | {"model"}
    shown = {name: value for name, value in values.items() if name in names and value is not None}
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in shown.items())


def _underscored(values: dict[str, Any], config: str | Path) -> dict[str, Any]:
    """Return the values of a file. Its names may have dashes, like flags. Raises SettingsError if a setting
    is given under both names."""
    named: dict[str, Any] = {}
    for name, value in values.items():
        underscored = name.replace("-", "_")
        if underscored in named:
            raise SettingsError(f"{underscored} is set twice (in {config}), with dashes and with underscores")
        named[underscored] = value
    return named


def _from_file(config: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_file(config, MAX_CONFIG_BYTES).decode())
    except OSError as error:
        raise SettingsError(f"cannot read {config}: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{config} is not TOML: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"{config} is nested too deeply") from error


def _from_environment(
    environ: Mapping[str, str], names: set[str], under: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of the environment. `under` are those of the file."""
    kinds = {option.name: option.kind for option in options()}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if variable.startswith(PREFIX) and variable not in (CONFIG_VARIABLE, KERNEL_PATH_VARIABLE):
            name = variable.removeprefix(PREFIX).lower()
            _check_name(name, names, f"as {variable} in the environment")
            values[name] = text.split(",") if kinds.get(name) is list else text
    return _adopted(values, names, "in the environment", under)


def _check_name(name: str, names: set[str], where: str) -> None:
    """Raise SettingsError for an unknown name."""
    if name not in names and name not in habits_by_name():
        near = near_name(name, [*names, *habits_by_name()])
        way_on = f"did you mean {near}?" if near else "`streamserve serve --help-all` shows all settings"
        raise SettingsError(f"there is no setting {name!r:.80} ({where}): {way_on}")


def _adopted(
    values: Mapping[str, Any], names: set[str], where: str, under: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that values mean, and log a warning for each value without effect. `under` are the
    settings of sources of lower precedence. Raises SettingsError for an unknown name."""
    for name in values:
        _check_name(name, names, where)
    adopted = adopt(values, under)
    for warning in adopted.warnings:
        _log.warning("%s", warning)
    return adopted.settings


def _texts(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value
