"""Latency targets of a request: in its body, or in headers that a proxy can add."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from streamserve.api.openai.schemas import SamplingFields
from streamserve.protocol.errors import RequestError
from streamserve.protocol.sampling import Slo

HEADERS = {"x-slo-tpot-ms": "tpot_ms", "x-slo-ttft-ms": "ttft_ms"}

T = TypeVar("T", bound=SamplingFields)


def with_header_targets(body: T, headers: Mapping[str, str]) -> T:
    """Return `body` with the latency targets from `headers`. Targets in the body take precedence.

    Raises RequestError if a header is not a positive number.
    """
    targets = {name: headers[header] for header, name in HEADERS.items() if header in headers}
    if not targets:
        return body
    values: dict[str, Any] = {
        name: _number(f"x-slo-{name}".replace("_", "-"), text) for name, text in targets.items()
    }
    if body.slo is not None:
        body_targets = {name: getattr(body.slo, name) for name in Slo.__struct_fields__}
        values |= {name: value for name, value in body_targets.items() if value is not None}
    return msgspec.structs.replace(body, slo=Slo(**values))


def header_parameters() -> list[dict[str, Any]]:
    """Return the headers for the OpenAPI description."""
    return [
        {
            "name": header,
            "in": "header",
            "description": f"slo.{name}, where the body does not set it",
            "schema": {"type": "number", "exclusiveMinimum": 0},
        }
        for header, name in HEADERS.items()
    ]


def _number(header: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise RequestError(f"{header} must be a number above 0, got {text[:40]!r}", field=header)
    return value
