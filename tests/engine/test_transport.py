"""Transfer reservations that do not match their request are refused before anything is written."""

import dataclasses
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from streamserve.baselines.speculation import parse_policy
from streamserve.engine.engine import Engine
from streamserve.engine.ports import EnginePorts
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.messages import Cancel, Pushed
from streamserve.protocol.reports import TransferReport
from streamserve.protocol.sampling import SamplingParams
from streamserve.protocol.transfers import CacheAddress, Push, TransferReservation
from streamserve.simulate.executor import CostExecutor
from streamserve.simulate.transport import SimulatedTransport
from streamserve.speculation.controller import Speculation, default_cost
from tests.engine.drive import VOCAB, assert_engine_empty, model_info, submit

CONFIG = EngineConfig(num_blocks=32, block_size=4, max_model_len=64)
PROMPT = list(range(10))
GOOD = TransferReservation(
    "decode/0", "r", 0, (0,), len(PROMPT), 0, [3, 1, 2], CacheAddress("decode", 0, 8, "fake")
)


def run_prefill(
    reservation: TransferReservation,
    twice: bool = False,
    wire: list[Callable[[], None]] | None = None,
    clock: Callable[[], float] = lambda: 0.0,
) -> tuple[Engine, list[tuple[int, int]], list[Pushed]]:
    """Return a prefill worker that has computed the prompt and received this reservation, the copies that it
    made and its notifications. With a `wire`, copies complete when the test calls them."""
    own, other = (CostExecutor(n, 4, VOCAB, lambda rows, context: 1.0) for n in (CONFIG.num_blocks, 8))
    written: list[tuple[int, int]] = []
    receive = other.receive

    def record(source: CostExecutor, copies: list[tuple[int, int]]) -> None:
        written.extend(copies)
        receive(source, copies)

    other.receive = record  # type: ignore[method-assign]

    def schedule(seconds: float, land: Callable[[], None]) -> None:
        land() if wire is None else wire.append(land)

    transport = SimulatedTransport(own, lambda path: other if path == "decode" else None, schedule, 0.0)
    speculation = Speculation(parse_policy("off"), default_cost)
    engine = Engine(
        CONFIG, model_info(64), own, clock, None, speculation, EnginePorts("prefill", transport)
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=5)
    engine.handle(submit("r", PROMPT, params, phase="prefill"))
    engine.step()
    engine.handle(Push(reservation))
    if twice:
        engine.handle(Push(reservation))
    closed = [update for update in engine.transfers.take_updates() if isinstance(update, Pushed)]
    return engine, written, closed


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
    """Otherwise its receiver would be told that no worker writes to the blocks, while one does."""
    engine, written, closed = run_prefill(GOOD, twice=True)
    assert [(update.reservation_id, update.error) for update in closed] == [(GOOD.id, "")]
    assert len(written) == len(GOOD.blocks)
    engine.step()
    assert_engine_empty(engine)


def test_a_cancelled_request_is_not_a_transfer_failure() -> None:
    """Its blocks are freed once no copy reads them."""
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
    """Each transfer by itself: the sum never falls, however long the next one is waited for."""
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


def test_a_missing_receiver_is_a_transfer_failure() -> None:
    engine, _, _ = run_prefill(replace(GOOD, to=replace(GOOD.to, path="missing")))
    transfer = engine.report().transfer
    assert transfer is not None
    assert transfer.failed == 1
