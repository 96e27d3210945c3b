"""A service reports predictions with measurements, metrics, and an audit log."""

import logging
import random

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from streamserve.draft_service.server.explain import explain, report
from streamserve.draft_service.server.metrics import COUNTERS, GAUGES, PREFIX, DraftCollector
from streamserve.draft_service.server.types import ServiceConfig
from streamserve.draft_service.star import Star as Model
from streamserve.protocol.drafting import DraftRequests
from tests.draft_service.service_client import ServiceClient
from tests.draft_service.star import Network, Star

S, Z = 0.01, 0.04


@pytest.fixture
def star() -> Star:
    """Three targets that were served for some seconds."""
    config = ServiceConfig(num_blocks=400, max_batch=1)
    network, cost = Network(delay=0.0), lambda batch: S
    star = Star(random.Random(1), config, 3, 1, network, cost, verify=Z, max_wait=5.0, length=200)
    star.run(5.0)
    return star


def test_predictions_are_reported_with_measurements(star: Star) -> None:
    service, model = star.services[0], Model(S, Z)
    before = report(service, star.now)
    star.run(10.0)
    current = report(service, star.now)
    assert (current.targets, current.active, current.depth) == (3, 3, 4.0)
    assert current.n_full == model.n_full
    assert current.predicted_round_seconds == pytest.approx(model.round(3), rel=0.05)
    assert current.predicted_idle_seconds == pytest.approx(model.idle(3), rel=0.05)
    assert current.predicted_load == pytest.approx(model.load(3), rel=0.05)
    text = explain(current, before)
    assert "N = 3 of 3 targets" in text
    assert f"N_full = {current.n_full}  N_max = {current.n_max}" in text
    for line in ("round", "T_idle", "load"):
        (shown,) = (each for each in text.splitlines() if each.startswith(line))
        assert "predicted" in shown
        assert "measured" in shown
    assert "kept warm: no" in text


def test_metrics_match_the_report(star: Star) -> None:
    collector, registry = DraftCollector(), CollectorRegistry()
    registry.register(collector)
    assert PREFIX not in generate_latest(registry).decode(), "nothing was reported yet"
    collector.report = current = report(star.services[0], star.now)
    text = generate_latest(registry).decode()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(samples[f"{PREFIX}n_full"]) == current.n_full
    assert float(samples[f"{PREFIX}predicted_load"]) == pytest.approx(current.predicted_load)
    assert float(samples[f"{PREFIX}accepted_total"]) == current.sums.accepted > 0
    assert {f"{PREFIX}{name}" for name in GAUGES} <= set(samples)
    assert {name for name in COUNTERS if not any(f"{PREFIX}{name}" in key for key in samples)} == set()


def test_the_log_has_a_line_for_each_session_and_nothing_of_its_prompts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, prompt = ServiceClient(lease=1.0), [33, 44, 33, 44]
    with caplog.at_level(logging.INFO, "streamserve.draft.audit"):
        client.hello("web-1", key="ab" * 32)
        welcome = client.welcomes["web-1"]
        deltas = [client.delta("web-1", prompt)]
        request = DraftRequests(tag=welcome.tag, channel=welcome.channel, deltas=deltas)
        client.service.heard(b"web-1", request, client.now, "ab" * 32)
        client.draft_batch()
        client.service.tick(50.0)
    opened, closed = (record.getMessage() for record in caplog.records)
    assert f"session {welcome.tag} opened: target 'web-1', key {'ab' * 8}…" in opened
    assert f"session {welcome.tag} closed, as its lease expired: target 'web-1'" in closed
    assert "1 requests, 1 trees, 0 of 0 draft tokens accepted" in closed
    assert not {"33", "44"} & set(closed.replace(",", " ").split())
