"""Workers that die, misfit or rest, and when they are started anew."""

from typing import Any

import pytest
from msgspec.structs import replace

from streamserve.control.crew import Crew
from streamserve.control.events import Start
from streamserve.control.workers import RECENT, Topology, WorkerState, pairs, unified
from streamserve.protocol.messages import CostCurve
from streamserve.protocol.reports import StepParts
from tests.api.test_metrics import REPORT
from tests.control.test_fleet import READY


def started(topology: Topology, **given) -> Crew:
    limits = {"stuck_after": 30.0, "max_restarts": 3, "restart_window": 300.0} | given
    crew = Crew(topology, **limits)
    crew.start(0.0)
    for worker in topology.names:
        assert crew.join(worker, READY)
    return crew


def test_each_further_loss_is_followed_by_a_longer_wait() -> None:
    crew = started(unified(1), max_restarts=4)
    waits = []
    for incarnation in range(1, 5):
        (start,) = crew.lose("unified-0", incarnation, "killed", float(incarnation)) or ()
        assert (start.worker, start.incarnation) == ("unified-0", incarnation + 1)
        waits.append(start.after)
    assert waits == [0.0, 0.5, 1.0, 2.0]
    assert crew.lose("unified-0", 5, "killed", 6.0) == []
    assert not crew.serving()


def test_losses_long_ago_are_forgotten() -> None:
    crew = started(unified(1), restart_window=10.0)
    crew.lose("unified-0", 1, "killed", 1.0)
    assert crew.lose("unified-0", 2, "killed", 20.0) == [Start("unified-0", 3)]


def test_a_loss_is_told_once() -> None:
    crew = started(unified(1))
    assert crew.lose("unified-0", 1, "killed", 1.0)
    assert crew.lose("unified-0", 1, "killed", 1.0) is None


def test_one_half_that_drains_closes_its_pair() -> None:
    crew = started(pairs(2))
    crew.workers["decode-0"].draining = True
    assert crew.open() == {"prefill-0", "prefill-1", "decode-1"}
    assert crew.health() == (True, "ready")
    assert crew.closed() == ""


def test_who_drains_serves_what_is_open_when_nobody_else_is_left() -> None:
    crew = started(pairs(2))
    crew.workers["prefill-0"].draining = True
    for incarnation in range(1, 5):
        crew.lose("decode-1", incarnation, "killed", 1.0)
    assert "prefill-0" in crew.open()
    assert crew.closed() == "draining: prefill-0", "but nothing new"
    assert not crew.health()[0]


@pytest.mark.parametrize(
    ("other", "both"),
    [
        ({"block_size": 8}, ("pretended/8/1", "pretended/4/1")),
        ({"model": replace(READY.model, fingerprint="another")}, ("another/4/1", "pretended/4/1")),
        ({"draft": "drafty"}, ("pretended/drafty/4/1", "pretended/4/1")),
    ],
)
def test_a_worker_that_does_not_fit_is_not_taken(other: dict[str, Any], both: tuple[str, str]) -> None:
    crew = started(pairs(1))
    crew.lose("decode-0", 1, "killed", 1.0)
    assert not crew.join("decode-0", replace(READY, **other))
    assert crew.serving() == {"prefill-0"}
    failure = crew.workers["decode-0"].failure
    assert failure
    assert failure.error == f"its KV is of {both[0]}, that of worker prefill-0 of {both[1]}"


def test_a_worker_is_priced_by_the_curve_it_tells() -> None:
    curve = CostCurve(
        kv_token_bytes=10, tokens=(1, 100), kv_bytes=(0, 1000), seconds=((1.0, 2.0), (3.0, 4.0)),
        pair_seconds=0.5, token_seconds=0.0, byte_seconds=0.0,
    )  # fmt: skip
    crew = started(unified(1))
    assert crew.join("unified-0", replace(READY, cost=curve))
    costs = crew.workers["unified-0"].load("unified-0", 0.0).costs
    assert costs
    assert costs.prefill(100) == 3.0 + 0.5 * (100 * 99 / 2), "long prompts cost more than their rows"
    assert costs.decode(1, 50) == 1.5
    assert costs.block_size == READY.block_size


def test_what_speculation_brings_is_told_by_reports() -> None:
    def told(generated: int, accepted: int, target: float, draft: float):
        return replace(
            REPORT,
            generation_tokens=generated,
            step_parts=StepParts(scheduling=0.0, draft=draft, target=target),
            speculation=replace(REPORT.speculation, accepted=accepted),
        )

    worker = WorkerState()
    worker.reported(told(100, 50, 1.0, 0.5))
    assert worker.speedup == 1.0, "one report alone tells nothing of now"
    worker.reported(told(160, 90, 2.0, 1.0))  # 60 tokens in 20 sequence steps, a third of the time drafting
    assert worker.speedup == pytest.approx(1.0 + RECENT * (3.0 * 2 / 3 - 1.0))
    worker.reported(told(160, 90, 2.0, 1.0))
    assert worker.speedup == pytest.approx(1.0 + RECENT * (3.0 * 2 / 3 - 1.0)), "nothing happened"
