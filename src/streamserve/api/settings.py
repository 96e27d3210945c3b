"""Operator settings of the API server."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from streamserve.protocol.keys import tenants


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Settings of the API.

    `default_sampling` are sampling values (fields of SamplingParams) for requests that do not set them, as a
    checkpoint's generation_config.json may recommend. Requests above a limit are refused; `max_memory_bytes`
    bounds the memory of all requests together (memory.py).

    `tool_parser` and `reasoning_parser` are names in text/tools/formats.py and text/reasoning.py.
    With `strict_fields`, fields that are unknown or without effect are refused (http/ignored_fields.py).
    `request_timeout` is in seconds (None: no limit). `api_keys`, `admin_keys` and `metrics_keys` are digests,
    `api_keys` each alone or with its tenant's name (protocol/keys.py). Several tenants have separate cached
    prefixes, unless `share_prefixes` is set.
    Up to `max_workers` workers need descriptors of this process.
    With `local_only`, only localhost and IP addresses are accepted as Host. At most `max_streams` prompt
    streams may be open; one without any request for `stream_ttl` seconds is dropped. At most
    `max_stored_responses` of `max_stored_response_bytes` together are kept, each for `stored_response_ttl`
    seconds.

    `batch_folder` keeps files and batches (None: these routes are disabled): files of at most
    `max_batch_file_bytes`, all together of `max_batch_folder_bytes`, batches of at most `max_batch_requests`.
    At most `batch_concurrency` of their requests are open at once.
    """

    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    max_body_bytes: int = 8 << 20
    max_memory_bytes: int = 256 << 20
    max_prompts: int = 1024
    request_timeout: float | None = None
    api_keys: Collection[str] = ()
    admin_keys: Collection[str] = ()
    metrics_keys: Collection[str] = ()
    share_prefixes: bool = False
    max_requests_per_key: int | None = None
    cors_origins: Collection[str] = ()
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    local_only: bool = False
    strict_fields: bool = False
    max_streams: int = 512
    stream_ttl: float = 300.0
    max_stored_responses: int = 1024
    max_stored_response_bytes: int = 64 << 20
    stored_response_ttl: float = 86_400.0
    batch_folder: str | None = None
    max_batch_file_bytes: int = 100 << 20
    max_batch_folder_bytes: int = 1 << 30
    max_batch_requests: int = 50_000
    batch_concurrency: int = 32
    max_workers: int = 0

    @cached_property
    def several_tenants(self) -> bool:
        """Whether the API keys are of more than one tenant."""
        return len(set(tenants(self.api_keys).values())) > 1
