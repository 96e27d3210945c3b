"""Requests are traced: spans in virtual time, a timeline file, and OpenTelemetry traces."""

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import ClientEdit, Close, Drain, Open, WorkerLost, WorkerMessage
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.tracing.recorder import Recorder, TraceSpan
from streamserve.fleet.tracing.telemetry import Telemetry
from streamserve.fleet.tracing.timeline import Timeline
from streamserve.fleet.worker_state import pairs
from streamserve.protocol.messages import Admitted, Events, Finished, Pushed, Reserved, Token, Transfers, Work
from streamserve.protocol.sampling import SamplingParams
from tests.fleet.fakes import READY
from tests.fleet.pair_fakes import OPEN, D, P, reservation


@dataclass
class StoringSink:
    """A sink that stores its spans."""

    spans: list[TraceSpan] = field(default_factory=list)
    closed: bool = False

    def add(self, span: TraceSpan) -> None:
        self.spans.append(span)

    def close(self) -> None:
        self.closed = True

    def named(self, name: str) -> TraceSpan:
        (found,) = (span for span in self.spans if span.name == name)
        return found


def record(*sinks) -> tuple[Fleet, Recorder]:
    fleet = Fleet(FleetConfig(topology=pairs(1)))
    fleet.start(0.0)
    for worker in (P, D):
        fleet.handle(WorkerMessage(worker, 1, READY), 0.0)
    return fleet, Recorder(sinks)


def send_updates(fleet: Fleet, recorder: Recorder, event, now: float) -> None:
    recorder.observe(event, fleet.handle(event, now), now)


def live(fleet: Fleet, recorder: Recorder) -> None:
    """A request from 1.0 to 6.0 on a pair."""
    send_updates(fleet, recorder, OPEN, 1.0)
    mine = reservation(fleet.requests["r"].attempt)
    a = mine.attempt
    recorder.record_work(P, [Work("submitted", "r", 1.1), Work("step", "", 1.2, 0.3, 40)])
    send_updates(fleet, recorder, WorkerMessage(P, 1, Events([Admitted("r", a, 0, 0)])), 2.0)
    send_updates(fleet, recorder, WorkerMessage(D, 1, Transfers([Reserved("r", a, mine)])), 3.0)
    send_updates(fleet, recorder, WorkerMessage(P, 1, Events([Token("r", a, 0, 0, 7)])), 4.0)
    send_updates(fleet, recorder, WorkerMessage(P, 1, Transfers([Pushed("r", a, mine.id)])), 4.5)
    recorder.record_work(P, [Work("output 0", "r", 3.9)])
    recorder.record_work(D, [Work("finishing", "r", 5.9)])
    send_updates(fleet, recorder, WorkerMessage(D, 1, Events([Token("r", a, 0, 1, 8, finish="stop")])), 6.0)


def test_the_phases_of_a_request_are_consecutive() -> None:
    kept = StoringSink()
    live(*record(kept))
    times = {span.name: (span.start, span.end) for span in kept.spans}
    assert times["queued"] == (1.0, 2.0)
    assert times["prompt"] == (2.0, 4.0)
    assert times["transfer"] == (3.0, 4.5)
    assert times["decode"] == (4.0, 6.0)
    assert times["request"] == (1.0, 6.0)
    assert times["step"] == pytest.approx((1.2, 1.5))
    assert kept.named(f"at {P}").events == (("submitted", 1.1), ("output 0", 3.9))
    assert kept.named(f"at {D}").process == D
    assert kept.spans[-1].name == "request", "the last span of a request"


def test_a_cancelled_request_ends_its_spans() -> None:
    kept = StoringSink()
    fleet, recorder = record(kept)
    send_updates(fleet, recorder, OPEN, 1.0)
    send_updates(fleet, recorder, Close("r"), 2.0)
    assert [(span.name, span.end) for span in kept.spans] == [("request", 2.0)]
    send_updates(fleet, recorder, Close("r"), 3.0)
    assert len(kept.spans) == 1


def test_refusals_edits_and_draining_are_recorded() -> None:
    kept = StoringSink()
    fleet, recorder = record(kept)
    send_updates(fleet, recorder, Drain(P, True), 1.0)
    send_updates(fleet, recorder, OPEN, 2.0)
    assert kept.named("draining").process == P
    assert kept.named("request").start == kept.named("request").end == 2.0
    send_updates(fleet, recorder, Drain(P, False), 3.0)
    send_updates(fleet, recorder, Open("s", [1], SamplingParams(seed=1, max_tokens=1), open=True), 4.0)
    send_updates(fleet, recorder, ClientEdit("s", 1, 1, [2]), 5.0)
    send_updates(fleet, recorder, Close("s"), 6.0)
    assert kept.named("at front").events == (("edit", 5.0),)
    recorder.close()
    assert kept.closed


def test_a_timeline_is_what_chrome_reads(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    fleet, recorder = record(Timeline(path))
    live(fleet, recorder)
    before = path.read_text()
    assert json.loads(before.rstrip(",\n") + "]"), "it can be read before it is complete"
    recorder.close()
    events = json.loads(path.read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("ph") == "M"}
    assert set(names.values()) == {"front", P, D}
    (step,) = (event for event in events if event.get("ph") == "X")
    assert (names[step["pid"]], step["ts"], step["dur"]) == (P, 1.2e6, 0.3e6)
    started = [event["name"] for event in events if event.get("ph") == "b"]
    ended = [event["name"] for event in events if event.get("ph") == "e"]
    assert sorted(started) == sorted(ended)
    assert {"queued", "prompt", "transfer", "decode", "request"} <= set(started)
    assert {event["id"] for event in events if event.get("ph") == "b"} == {"r"}
    assert {"submitted", "output 0", "finishing"} <= {e["name"] for e in events if e.get("ph") == "n"}


def test_a_timeline_never_waits_for_the_reader_of_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "timeline"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device or address"):
        Timeline(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    timeline = Timeline(pipe)

    def fill() -> None:
        for number in range(10_000):  # a pipe holds some hundred lines
            timeline.add(TraceSpan("queued", "front", f"r{number}", 0.0, 1.0))

    with pytest.raises(BlockingIOError):
        fill()
    with contextlib.suppress(OSError):  # closing writes the line that did not fit
        timeline._file.close()
    os.close(reader)


def test_a_request_is_one_trace_of_opentelemetry() -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    fleet, recorder = record(Telemetry(export.SimpleSpanProcessor(exporter)))
    live(fleet, recorder)
    recorder.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans["request"]
    assert root.parent is None
    assert "step" not in spans
    for name, span in spans.items():
        assert span.context.trace_id == root.context.trace_id
        assert span.attributes["request"] == "r"
        assert name == "request" or span.parent.span_id == root.context.span_id
    assert spans["decode"].end_time - spans["decode"].start_time == pytest.approx(2e9, abs=1e3)
    assert spans[f"at {D}"].attributes["process"] == D
    assert [event.name for event in spans[f"at {P}"].events] == ["submitted", "output 0"]


def test_nothing_is_stored_of_requests_that_ended() -> None:
    """Nothing is stored of requests that have ended, for every kind of end, and with late messages of
    workers."""
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    telemetry = Telemetry(export.SimpleSpanProcessor(exporter))
    fleet, recorder = record(telemetry)
    count = 40
    for number in range(count):
        name, now = f"r{number}", 10.0 * number
        send_updates(fleet, recorder, Open(name, [1, 2], SamplingParams(n=2, seed=1, max_tokens=4)), now)
        recorder.record_work(P, [Work("submitted", name, now)])
        attempt = fleet.requests[name].attempt
        how = 3 if number == 3 else number % 3
        if how == 0:
            send_updates(fleet, recorder, Close(name, 0), now + 1)
        if how in (0, 1):
            send_updates(fleet, recorder, Close(name), now + 2)
        elif how == 2:
            error = [Finished(name, attempt, choice, "error", "broken", 500) for choice in (0, 1)]
            send_updates(
                fleet, recorder, WorkerMessage(P, fleet.workers[P].incarnation, Events(error)), now + 2
            )
        else:
            for loss in range(3):
                send_updates(fleet, recorder, WorkerLost(P, 1 + loss, "killed"), now + 2 + loss)
                send_updates(fleet, recorder, WorkerMessage(P, 2 + loss, READY), now + 2 + loss)
            send_updates(fleet, recorder, Close(name), now + 6)
        recorder.record_work(P, [Work("finishing", name, now + 7)])
        recorder.record_work(D, [Work("reserved", name, now + 7)])
        send_updates(fleet, recorder, ClientEdit(name, 1, 1, [2]), now + 8)
    send_updates(fleet, recorder, Drain(P, True), 1e4)
    send_updates(fleet, recorder, Open("refused", [1], SamplingParams(seed=1, max_tokens=1)), 1e4)
    recorder.record_work(P, [Work("submitted", "refused", 1e4)])
    traces = {span.attributes["request"] for span in exporter.get_finished_spans()}
    assert len(traces) == count + 1
    assert (recorder.open, telemetry.pending) == (0, 0)
    recorder.close()
