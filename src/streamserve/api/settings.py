"""Operator settings of the API server."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from streamserve.protocol.keys import tenants


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Settings of the API. Requests above a limit are refused.

    - `default_sampling`: values (fields of SamplingParams) for requests that do not set them, for example
      from a checkpoint's generation_config.json.
    - `max_memory_bytes`: the memory of all requests together (memory.py).
    - `request_timeout`: in seconds; None: no limit.
    - `api_keys`, `admin_keys`, `metrics_keys`: digests. An API key's digest may be followed by its tenant's
      name (protocol/keys.py).
    - `share_prefixes`: tenants share cached prefixes; otherwise each has separate ones.
    - `tool_parser`, `reasoning_parser`: names in text/tools/formats.py and text/reasoning.py.
    - `local_only`: only localhost and IP addresses are accepted as Host.
    - `strict_fields`: unknown fields and fields without effect are refused (http/ignored_fields.py).
    - `max_streams`: open prompt streams; a stream without a request for `stream_ttl` seconds is dropped.
    - `max_stored_responses`, `max_stored_response_bytes`: limits of all stored responses; each is kept for
      `stored_response_ttl` seconds.
    - `batch_folder`: keeps files and batches; None: these routes are disabled. `max_batch_file_bytes` limits
      one file, `max_batch_folder_bytes` all of them. `batch_concurrency`: open requests of all batches.
    - `max_workers`: this process reserves descriptors for this many workers.
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
        """Whether the API keys belong to more than one tenant."""
        return len(set(tenants(self.api_keys).values())) > 1
