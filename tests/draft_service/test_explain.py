"""What a service tells of itself: the prediction beside what was measured; who used it, never for what."""

import logging
import random

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from streamserve.draft_service.server.explain import explain, report
from streamserve.draft_service.server.metrics import COUNTERS, GAUGES, PREFIX, DraftCollector
from streamserve.draft_service.server.types import ServiceConfig
from streamserve.draft_service.star import Star as Model
from streamserve.protocol.drafting import Ask
from tests.draft_service.star import Network, Star
from tests.draft_service.talk import Talk

S, Z = 0.01, 0.04


@pytest.fixture
def star() -> Star:
    """Three targets that have been served for a while."""
    config = ServiceConfig(num_blocks=400, max_batch=1)
    network, cost = Network(delay=0.0), lambda batch: S
    star = Star(random.Random(1), config, 3, 1, network, cost, verify=Z, patience=5.0, length=200)
    star.run(5.0)
    return star


def test_predictions_stand_beside_what_was_measured(star: Star) -> None:
    service, model = star.services[0], Model(S, Z)
    before = report(service, star.now)
    star.run(10.0)
    found = report(service, star.now)
    assert (found.targets, found.active, found.depth) == (3, 3, 4.0)
    assert found.full == model.full
    assert found.predicted_round_seconds == pytest.approx(model.round(3), rel=0.05)
    assert found.predicted_idle_seconds == pytest.approx(model.idle(3), rel=0.05)
    assert found.predicted_load == pytest.approx(model.load(3), rel=0.05)
    text = explain(found, before)
    assert "N = 3 of 3 targets" in text
    assert f"N_full = {found.full}  N_max = {found.most}" in text
    for line in ("round", "T_idle", "load"):
        (said,) = (each for each in text.splitlines() if each.startswith(line))
        assert "predicted" in said
        assert "measured" in said
    assert "kept warm: no" in text


def test_metrics_say_the_same(star: Star) -> None:
    collector, registry = DraftCollector(), CollectorRegistry()
    registry.register(collector)
    assert PREFIX not in generate_latest(registry).decode(), "nothing was reported yet"
    collector.report = found = report(star.services[0], star.now)
    text = generate_latest(registry).decode()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(samples[f"{PREFIX}full"]) == found.full
    assert float(samples[f"{PREFIX}predicted_load"]) == pytest.approx(found.predicted_load)
    assert float(samples[f"{PREFIX}accepted_total"]) == found.sums.accepted > 0
    assert {f"{PREFIX}{name}" for name in GAUGES} <= set(samples)
    assert {name for name in COUNTERS if not any(f"{PREFIX}{name}" in key for key in samples)} == set()


def test_the_log_has_a_line_for_each_session_and_nothing_of_its_prompts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    talk, prompt = Talk(lease=1.0), [33, 44, 33, 44]
    with caplog.at_level(logging.INFO, "streamserve.draft.audit"):
        talk.hello("web-1", key="ab" * 32)
        welcome = talk.welcomes["web-1"]
        ask = Ask(tag=welcome.tag, channel=welcome.channel, deltas=[talk.delta("web-1", prompt)])
        talk.service.heard(b"web-1", ask, talk.now, "ab" * 32)
        talk.turn()
        talk.service.tick(50.0)
    opened, closed = (record.getMessage() for record in caplog.records)
    assert f"session {welcome.tag} opened: target 'web-1', key {'ab' * 8}…" in opened
    assert f"session {welcome.tag} closed, as its lease ran out: target 'web-1'" in closed
    assert "1 requests, 1 trees, 0 of 0 guesses accepted" in closed
    assert not {"33", "44"} & set(closed.replace(",", " ").split())
