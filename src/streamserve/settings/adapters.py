"""Settings of LoRA adapters: their names and folders, and their limits."""

import os
from collections.abc import Sequence

import msgspec

from streamserve.protocol.adapters import CONFIG_FILE, check_name, folder_of
from streamserve.protocol.config import ModelConfig
from streamserve.settings.options import SettingsError
from streamserve.settings.server_config import ServerConfig


def adapter_paths(given: Sequence[str]) -> dict[str, str]:
    """Return the folders of adapters by name, from NAME=PATH. Raises SettingsError for other forms."""
    paths = dict[str, str]()
    for text in given:
        name, equals, path = text.partition("=")
        refusal = check_name(name, frozenset(paths))
        if not equals or not path or refusal:
            raise SettingsError(
                f"lora = {text!r}: must be NAME=PATH{f': {refusal}' if equals and path else ''}"
            )
        paths[name] = path
    return paths


def with_adapters(model: ModelConfig, server: ServerConfig, name: str) -> ModelConfig:
    """Return the settings of a model with the number of its adapters. Raises SettingsError if the adapters
    cannot be served with these settings."""
    paths = adapter_paths(server.lora)
    count = model.max_loras or len(paths)
    if len(paths) > count:
        raise SettingsError(f"max_loras = {count}: lora gives {len(paths)} adapters")
    taken = frozenset(server.served_model_name or (name,))
    for adapter, path in paths.items():
        if refusal := check_name(adapter, taken):
            raise SettingsError(f"lora = {adapter!r}: {refusal}")
        if not os.path.isfile(folder_of(path) / CONFIG_FILE):
            raise SettingsError(f"lora = {adapter + '=' + path!r}: there is no {CONFIG_FILE} in that folder")
    return msgspec.structs.replace(model, max_loras=count)
