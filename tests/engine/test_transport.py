"""Transfer reservations that do not match their request are refused before anything is written."""

import dataclasses
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from streamserve.engine.observer import LifecycleEvent, Observer
from streamserve.protocol.messages import Cancel, Pushed, RequestKind
from streamserve.protocol.reports import TransferReport
from streamserve.protocol.sampling import SamplingParams
from streamserve.protocol.transfers import Push
from streamserve.simulate.transport import SimulatedTransport
from tests.engine.drive import assert_engine_empty, submit
from tests.engine.prefill import GOOD, PROMPT, run_prefill


def test_a_valid_reservation_is_served() -> None:
    engine, written, closed = run_prefill(GOOD)
    assert [there for _, there in written] == GOOD.blocks
    assert [(update.reservation_id, update.error) for update in closed] == [(GOOD.id, "")]
    engine.step()
    assert_engine_empty(engine)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"request": "other"}, "not have the request"),
        ({"attempt": 7}, "not have the request"),
        ({"choices": (1,)}, "not have the request"),
        ({"tokens": 9}, "for 9 tokens"),
        ({"adapter": "another"}, "of another LoRA adapter"),
        ({"start": 3}, "tokens"),
        ({"start": -4}, "blocks"),
        ({"start": 4}, "blocks"),
        ({"blocks": [3, 1]}, "blocks"),
        ({"blocks": [3, 1, 2, 4]}, "blocks"),
        ({"blocks": [3, 1, 3]}, "blocks"),
        ({"blocks": [3, 1, 8]}, "blocks"),
        ({"blocks": [3, 1, -1]}, "blocks"),
        ({"to": replace(GOOD.to, path="missing")}, "gone"),
    ],
)
def test_an_invalid_reservation_is_refused_and_nothing_is_written(
    changed: dict[str, object], message: str
) -> None:
    reservation = replace(GOOD, **changed)
    _, written, closed = run_prefill(reservation)
    assert not written
    (update,) = closed
    assert update.reservation_id == reservation.id
    assert message in update.error


def test_the_same_reservation_twice_is_served_once() -> None:
    engine, written, _ = run_prefill(GOOD)
    engine.handle(Push(GOOD))
    (update,) = engine.transfers.take_updates()
    assert isinstance(update, Pushed)
    assert "not have the request" in update.error
    assert len(written) == len(GOOD.blocks)


def test_a_duplicate_reservation_is_ignored_while_it_is_served() -> None:
    """A duplicate reservation is ignored while the first one is served; otherwise the receiver would be told
    that no worker writes to its blocks, while one does."""
    engine, written, closed = run_prefill(GOOD, twice=True)
    assert [(update.reservation_id, update.error) for update in closed] == [(GOOD.id, "")]
    assert len(written) == len(GOOD.blocks)
    engine.step()
    assert_engine_empty(engine)


def test_a_cancelled_request_is_not_a_transfer_failure() -> None:
    """A cancelled request is not a transfer failure. Its blocks are freed once no copy reads them."""
    wire: list[Callable[[], None]] = []
    engine, _, closed = run_prefill(GOOD, wire=wire)
    assert not closed
    engine.handle(Cancel("r"))
    assert not engine.transfers.take_updates()
    wire.pop()()
    (update,) = engine.transfers.take_updates()
    assert isinstance(update, Pushed)
    assert "removed" in update.error
    assert engine.report().transfer == TransferReport(sent_bytes=update.sent)
    engine.step()
    assert_engine_empty(engine)


@pytest.mark.parametrize(("exposed", "hidden"), [(0.0, 0.5), (0.125, 0.375), (2.0, 0.0)])
def test_the_hidden_time_of_a_transfer_is_what_it_took_beyond_what_was_waited_for(
    monkeypatch: pytest.MonkeyPatch, exposed: float, hidden: float
) -> None:
    """The hidden time of a transfer is its duration minus the time that was waited for it, for each transfer
    separately: the sum never decreases, however long the next one is waited for."""
    landed = SimulatedTransport.landed
    monkeypatch.setattr(
        SimulatedTransport,
        "landed",
        lambda self: [dataclasses.replace(one, seconds=0.5) for one in landed(self)],
    )
    wire: list[Callable[[], None]] = []
    times = [0.0]
    engine, _, _ = run_prefill(GOOD, wire=wire, clock=lambda: times[0])
    times[0] += exposed
    wire.pop()()
    engine.transfers.take_updates()
    transfer = engine.report().transfer
    assert transfer is not None
    assert (transfer.exposed_seconds, transfer.hidden_seconds) == (exposed, hidden)


class Recorded(Observer):
    """The events that an observer received."""

    def __init__(self) -> None:
        self.events: list[tuple[LifecycleEvent, str]] = []

    def on_event(self, name: LifecycleEvent, request: str = "") -> None:
        self.events.append((name, request))


@pytest.mark.parametrize(
    ("kind", "counted"),
    [
        (RequestKind.CLIENT, {}),
        (RequestKind.WRITEBACK, {"writebacks": 1, "writeback_bytes": 2}),
        (RequestKind.STREAM_PUSH, {"arriving_copies": 1, "arriving_bytes": 2}),
    ],
)
def test_a_copy_is_counted_by_its_kind_and_not_observed(kind: RequestKind, counted: dict[str, int]) -> None:
    """A copy is counted by its kind, and is not an observed event. Its name does not tell the kind, since
    clients choose names."""
    observer = Recorded()
    engine, _, _ = run_prefill(GOOD, observer=observer)
    before = engine.report().transfer
    assert before is not None
    assert (before.handed_over, before.writebacks, before.arriving_copies) == (1, 0, 0)
    assert next(name for name, request in observer.events if request == "r") == "submitted"
    observer.events.clear()
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=0)
    assert not engine.handle(submit("return/1", PROMPT[:8], params, phase="return", kind=kind))
    engine.handle(Push(replace(GOOD, id="decode/1", request="return/1", tokens=8, blocks=[4, 5])))
    (update,) = engine.transfers.take_updates()
    assert isinstance(update, Pushed)
    assert update.error == ""
    after = engine.report().transfer
    assert after is not None
    grown = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("handed_over", "writebacks", "writeback_bytes", "arriving_copies", "arriving_bytes")
    }
    assert {name: count for name, count in grown.items() if count} == counted
    observed = [name for name, _ in observer.events]
    client = kind is RequestKind.CLIENT
    assert observed == (["submitted", "mid-layer push", "last layer landed"] if client else [])


def test_a_missing_receiver_is_a_transfer_failure() -> None:
    engine, _, _ = run_prefill(replace(GOOD, to=replace(GOOD.to, path="missing")))
    transfer = engine.report().transfer
    assert transfer is not None
    assert transfer.failed == 1
