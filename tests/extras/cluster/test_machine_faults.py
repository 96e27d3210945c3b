"""A few cases of machines that are lost or slow at lifecycle events. `python -m tests.campaigns
machine_faults` has all of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.campaigns.machine_faults import CASES, case, ray_case
from tests.conftest import Scale
from tests.extras.cluster.machine_faults import EVENTS, FAULTS, machine_faults
from tests.extras.cluster.namespaces import why_no_wire
from tests.extras.cluster.ray_machines import why_no_ray

REFUSED = why_no_wire()
NEEDS_NAMESPACES = pytest.mark.skipif(bool(REFUSED), reason=REFUSED)
ALWAYS = (("mid-layer push", "half-open connection", "decode-0"),)
"""The case that also runs without --full."""
MORE = (
    ("verified-before-commit", "delay of 200 ms", "prefill-0"),
    ("output 0", "stall", "decode-0"),
    ("swap", "cut link", "decode-0"),
    ("draining", "killed machine", "prefill-0"),
    ("first chunk", "killed worker", "prefill-0"),
)
NO_RAY = REFUSED or why_no_ray()
RAY_EVENTS = (("mid-layer push", "decode-0"), ("first chunk", "prefill-0"))


def test_seeds_have_every_event_with_every_fault() -> None:
    cases = {case(seed) for seed in range(2 * CASES)}
    assert len(cases) == 2 * len(EVENTS) * len(FAULTS)
    assert {case(seed)[:2] for seed in range(CASES)} == {case(seed)[:2] for seed in range(CASES, 2 * CASES)}
    assert len({ray_case(seed) for seed in range(2 * len(EVENTS))}) == 2 * len(EVENTS)


@NEEDS_NAMESPACES
async def test_a_machine_that_fails_at_an_event_costs_time_never_text(
    tmp_path: Path, scale: Scale, record: Callable[..., None]
) -> None:
    recovered = {}
    async with machine_faults(tmp_path) as faults:
        for event, fault, victim in (*ALWAYS, *(MORE if scale.full else ())):
            seconds = await faults.trial(event, fault, victim)
            recovered[f"{fault} of {victim}, {event}"] = round(seconds, 2)
    record(ready_again=recovered)


@pytest.mark.skipif(bool(NO_RAY), reason=NO_RAY)
async def test_a_ray_node_killed_at_an_event_costs_time_never_text(
    tmp_path: Path, scale: Scale, record: Callable[..., None]
) -> None:
    if not scale.full:
        pytest.skip("with --full")
    recovered = {}
    async with machine_faults(tmp_path, "ray") as faults:
        for event, victim in RAY_EVENTS:
            seconds = await faults.trial(event, "killed Ray node", victim)
            recovered[f"{victim}, {event}"] = round(seconds, 2)
    record(ready_again=recovered)
