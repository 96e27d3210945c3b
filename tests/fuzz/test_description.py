"""Valid and invalid requests generated from the OpenAPI description: for 90 seconds in full runs.

Every route and field of the description is covered, including those added later.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import jsonschema
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.api.serving import Served
from tests.conftest import Scale
from tests.fuzz.conftest import nothing_left

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]
STREAMS = {"text/event-stream", "application/x-ndjson"}
HANG_SECONDS = 60


def test_valid_and_invalid_requests(server: Served, scale: Scale, record: Callable[..., None]) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 10
    weights = [10 if operation.body else 1 for operation in operations]
    unit = scale.pick(2, 90) / sum(weights)
    plain: Counter[int] = Counter()
    bodies: Counter[int] = Counter()
    with nothing_left(server):
        for operation, weight in zip(operations, weights, strict=True):
            statuses = fuzz(operation, schema.raw_schema, weight * unit, scale.seed, scale.pick(2, 10))
            (bodies if operation.body else plain).update(statuses)
    assert bodies[200] > 0
    assert bodies[400] > 0
    record(with_bodies=dict(bodies), without=dict(plain), requests=bodies.total() + plain.total())


def fuzz(operation: Any, description: Any, seconds: float, seed: int, batch_size: int) -> Counter[int]:
    """Test an operation for some seconds, in batches; at least one batch runs. Return the statuses seen."""
    statuses: Counter[int] = Counter()
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    strategy = operation.as_strategy(generation_mode=modes[0])
    if operation.body or operation.query or operation.path_parameters:
        strategy |= operation.as_strategy(generation_mode=modes[1])

    @hypothesis.settings(
        max_examples=batch_size,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def batch(case: Any) -> None:
        response = case.call(timeout=HANG_SECONDS)
        statuses[response.status_code] += 1
        media = response.headers.get("content-type", [""])[0].partition(";")[0]
        if media in STREAMS:
            case.validate_response(response, checks=CHECKS)
            streamed = operation.definition.raw["responses"]["200"]["content"][media]["schema"]
            check_events(response.text, {**streamed["x-event"], "components": description["components"]})
        else:
            case.validate_response(response, checks=[*CHECKS, response_schema_conformance])

    deadline = time.monotonic() + seconds
    while not statuses or time.monotonic() < deadline:
        hypothesis.seed(seed)(batch)()
        seed += 1
    return statuses


def check_events(text: str, schema: dict[str, Any]) -> None:
    """Assert that every event of a stream matches the description, or is an error."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: ", "{"))]
    assert events
    for event in events:
        if event != "[DONE]" and "error" not in json.loads(event):
            jsonschema.validate(json.loads(event), schema)
