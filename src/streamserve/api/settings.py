"""Settings of the API server: the server's settings, and values that are known only when it starts."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from streamserve.protocol.keys import tenants
from streamserve.settings.server_config import ServerConfig


class ApiSettings(ServerConfig, frozen=True, kw_only=True, dict=True):
    """The server's settings, in which keys are digests, with three more values.

    - `default_sampling`: values (fields of SamplingParams) for requests that do not set them, for example
      from a checkpoint's generation_config.json.
    - `local_only`: only localhost and IP addresses are accepted as Host.
    - `worker_bound`: this process reserves descriptors for this many workers.
    """

    default_sampling: Mapping[str, Any] = {}
    local_only: bool = False
    worker_bound: int = 0

    @cached_property
    def several_tenants(self) -> bool:
        """Whether the API keys belong to more than one tenant."""
        return len(set(tenants(self.api_key).values())) > 1
