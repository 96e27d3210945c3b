"""What the operator decides about the door."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """`default_sampling` are sampling values for requests that don't say (fields of SamplingParams), as a
    checkpoint's generation_config.json may recommend them. Larger requests than the limits are refused."""

    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    max_body_bytes: int = 32 << 20
    max_prompts: int = 1024
