"""Which settings have an effect in which use: in a server all of them, in every other use only some.

Only a server has connections. `streamserve batch` has requests in the API's format. `streamserve generate`,
`streamserve chat` and `LLM` have prompts and sampling parameters. `streamserve profile` loads a model and
measures it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from streamserve.protocol.config import ModelConfig
from streamserve.settings.options import Option, SettingsError, options
from streamserve.settings.server_config import ServerConfig

Use = Literal["serve", "batch", "llm", "profile"]
"""What reads the settings: the command `streamserve serve`, `batch` or `profile`; or with `llm` the class
`LLM`, and the commands that are built on it (`generate` and `chat`)."""

_CONNECTIONS = frozenset(
    {
        "host", "port", "ssl_certfile", "ssl_keyfile", "models_memory_bytes", "idle_unload", "load_timeout",
        "memory_timeout", "max_requests_per_key", "max_connections", "max_connections_per_address",
        "max_streams", "stream_ttl", "batch_folder", "max_batch_file_bytes", "max_batch_folder_bytes",
        "max_batch_requests", "read_timeout", "write_timeout", "drain_timeout", "api_key", "api_key_file",
        "admin_key", "admin_key_file", "metrics_key", "metrics_key_file", "share_prefixes", "max_workers",
        "cors_origin", "access_log",
    }
)  # fmt: skip
"""Settings of features that only a server has: connections, keys, several models, prompt streams, and
files."""

_REQUESTS = frozenset(
    {
        "served_model_name", "max_body_bytes", "max_memory_bytes", "strict_fields", "max_stored_responses",
        "max_stored_response_bytes", "stored_response_ttl", "batch_concurrency",
        "trust_request_chat_template", "tool_parser", "reasoning_parser", "special_tokens_in_messages",
        "request_timeout",
    }
)  # fmt: skip
"""Settings of requests in the API's format."""

_MEASURED = frozenset(
    {
        "dtype", "kv_cache_dtype", "device", "tensor_parallel_size", "backend", "kernel_path", "numerics",
        "quantization", "head_quantization", "threads", "max_model_len", "kv_cache_bytes", "num_blocks",
        "block_size", "max_num_seqs", "max_num_batched_tokens", "draft", "task",
    }
)  # fmt: skip
"""Settings that affect how `streamserve profile` loads and measures a model."""

_PLACES = {
    "serve": "`streamserve serve`",
    "batch": "`streamserve batch`",
    "llm": "`LLM`, `streamserve generate` and `streamserve chat`",
    "profile": "`streamserve profile`",
}


def acting(use: Use) -> frozenset[str]:
    """Return the names of the settings that have an effect in a use."""
    every = frozenset(ModelConfig.__struct_fields__) - {"path"} | frozenset(ServerConfig.__struct_fields__)
    return {
        "serve": every,
        "batch": every - _CONNECTIONS,
        "llm": every - _CONNECTIONS - _REQUESTS,
        "profile": _MEASURED,
    }[use]


def defaults_in(use: Use) -> Mapping[str, Any]:
    """Return the defaults that differ in a use. Where the output is text for a person or a program, log
    messages below warnings would interrupt it."""
    return {"log_level": "warning"} if use in ("llm", "batch") else {}


def acting_options(use: Use) -> list[Option]:
    """Return the settings that have an effect in a use, in the order of all settings."""
    return [option for option in options() if option.name in acting(use)]


def other_options(use: Use) -> list[Option]:
    """Return the settings that have an effect only in other uses."""
    return [option for option in options() if option.name not in acting(use)]


def refuse_idle(flags: Mapping[str, Any], use: Use) -> None:
    """Raise SettingsError for a flag or argument without effect in this use. The message names the uses in
    which it has an effect."""
    for name in flags:
        if name not in acting(use) | {"model"}:
            raise SettingsError(f"{name}: it has no effect in {_PLACES[use]}: {_where(name)}")


@dataclass(frozen=True)
class Split:
    """Settings of a file and of the environment: `acting` have an effect; `idle` are the names of the others
    that differ from their defaults."""

    acting: dict[str, Any]
    idle: tuple[str, ...]


def split(values: Mapping[str, Any], use: Use) -> Split:
    """Divide values by whether they have an effect in this use. Settings without effect are not refused: a
    server may share the file and the environment."""
    names = acting(use) | {"model"}
    defaults = {option.name: option.default for option in options()}
    others = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
              if name not in names}  # fmt: skip
    idle = sorted(name for name, value in others.items() if value not in (None, defaults[name]))
    return Split({name: value for name, value in values.items() if name in names}, tuple(idle))


def idle_text(names: tuple[str, ...], use: Use) -> str:
    """Return a warning about settings of a file or of the environment that have no effect in this use."""
    return f"{', '.join(names)}: without effect in {_PLACES[use]}"


def _where(name: str) -> str:
    uses = [place for use, place in _PLACES.items() if name in acting(use)]  # type: ignore[arg-type]
    return f"it acts in {', '.join(uses[:-1])}{' and ' if uses[1:] else ''}{uses[-1]}"
