"""Settings of `streamserve draft` from its flags: the fields of DraftingConfig, and the settings of a model
in MODEL_OPTIONS."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamserve.protocol.config import ModelConfig
from streamserve.protocol.curve import parse_endpoint, read_clients, read_key_pair
from streamserve.protocol.drafting_config import DraftingConfig
from streamserve.settings.checkpoints import locate
from streamserve.settings.options import Option, SettingsError, convert, options

MODEL_OPTIONS = (
    "dtype", "backend", "kernel_path", "threads", "max_model_len", "kv_cache_bytes",
    "num_blocks", "block_size",
)  # fmt: skip
"""The model settings that apply to a draft model."""


@dataclass(frozen=True)
class DraftSettings:
    """The draft model's name as given, how to load the model, and how to draft."""

    name: str
    model: ModelConfig
    drafting: DraftingConfig


def draft_options() -> list[Option]:
    """Return every setting of a draft service except the model's name."""
    model_options = [option for option in options(ModelConfig) if option.name in MODEL_OPTIONS]
    return [*options(DraftingConfig), *model_options]


def resolve_draft(model: str | None, flags: Mapping[str, Any]) -> DraftSettings:
    """Resolve settings from flags; None counts as not set.

    Raises SettingsError for invalid settings, CheckpointError if the model is not found.
    """
    values = {name: value for name, value in flags.items() if value is not None}
    drafting = convert(values, DraftingConfig)
    _check(drafting)
    name = model or "embedded-draft"
    # Draft models of a service run on the CPU.
    fixed = {"path": str(locate(name)), "draft": "none", "device": "cpu"}
    model_config = convert({**values, **fixed}, ModelConfig)
    return DraftSettings(name, model_config, drafting)


def _check(config: DraftingConfig) -> None:
    try:
        endpoint = parse_endpoint(config.listen)
        if config.key:
            read_key_pair(config.key)
        if config.clients:
            read_clients(config.clients)
        for share in config.share:
            name, _, weight = share.rpartition("=")
            if not name or not 0 < float(weight) < 1e6:
                raise ValueError(f"share = {share!r}: must be NAME=WEIGHT with a weight above 0")
        if config.metrics:
            parse_endpoint(f"tcp://{config.metrics}")
    except ValueError as error:
        raise SettingsError(str(error)) from None
    if endpoint.server_key:
        raise SettingsError(
            "listen: the address must not contain a key: give the service's own key with --key"
        )
    if bool(config.key) != bool(config.clients):
        raise SettingsError("--key and --clients need each other: give both or neither")
    if not config.key and not endpoint.loopback:
        raise SettingsError(
            f"listen: {endpoint.address} can be reached from other machines, and a draft service receives "
            "all prompts: give --key and --clients (see `streamserve keys new`)"
        )
