"""Tickets that do not fit what they are for are refused before anything is written."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from streamserve.engine.engine import Engine
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.messages import Cancel, Pushed
from streamserve.protocol.reports import TransferReport
from streamserve.protocol.sampling import SamplingParams
from streamserve.protocol.tickets import CacheAddress, Push, TransferReservation
from streamserve.simulate.executor import CostExecutor
from streamserve.simulate.transport import SimulatedTransport
from streamserve.speculation.controller import Speculation, default_cost
from streamserve.speculation.policies import parse_policy
from tests.engine.drive import VOCAB, assert_engine_empty, model_info, submit

CONFIG = EngineConfig(num_blocks=32, block_size=4, max_model_len=64)
PROMPT = list(range(10))
GOOD = TransferReservation(
    "decode/0", "r", 0, (0,), len(PROMPT), 0, [3, 1, 2], CacheAddress("decode", 0, 8, "pretended")
)


def prefilled(
    ticket: TransferReservation, twice: bool = False, wire: list[Callable[[], None]] | None = None
) -> tuple[Engine, list[tuple[int, int]], list[Pushed]]:
    """A prefill worker that has computed the prompt and got this ticket: what it wrote, what it told. What
    is on the `wire`, if there is one, lands when the test says so."""
    own, other = (CostExecutor(n, 4, VOCAB, lambda rows, context: 1.0) for n in (CONFIG.num_blocks, 8))
    written: list[tuple[int, int]] = []
    receive = other.receive

    def noted(source: CostExecutor, copies: list[tuple[int, int]]) -> None:
        written.extend(copies)
        receive(source, copies)

    other.receive = noted  # type: ignore[method-assign]

    def later(seconds: float, land: Callable[[], None]) -> None:
        land() if wire is None else wire.append(land)

    transport = SimulatedTransport(own, lambda path: other if path == "decode" else None, later, 0.0)
    speculation = Speculation(parse_policy("off"), default_cost)
    engine = Engine(
        CONFIG, model_info(64), own, lambda: 0.0, None, speculation, transport=transport, name="prefill"
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=5)
    engine.handle(submit("r", PROMPT, params, phase="prefill"))
    engine.step()
    engine.handle(Push(ticket))
    if twice:
        engine.handle(Push(ticket))
    told = [news for news in engine.exchange.news() if isinstance(news, Pushed)]
    return engine, written, told


def test_a_good_ticket_is_served() -> None:
    engine, written, told = prefilled(GOOD)
    assert [there for _, there in written] == GOOD.blocks
    assert [(one.ticket, one.error) for one in told] == [(GOOD.id, "")]
    engine.step()
    assert_engine_empty(engine)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"request": "other"}, "not here"),
        ({"attempt": 7}, "not here"),
        ({"choices": (1,)}, "not here"),
        ({"tokens": 9}, "for 9 tokens"),
        ({"have": 3}, "tokens"),
        ({"have": -4}, "blocks"),
        ({"have": 4}, "blocks"),
        ({"blocks": [3, 1]}, "blocks"),
        ({"blocks": [3, 1, 2, 4]}, "blocks"),
        ({"blocks": [3, 1, 3]}, "blocks"),
        ({"blocks": [3, 1, 8]}, "blocks"),
        ({"blocks": [3, 1, -1]}, "blocks"),
        ({"to": replace(GOOD.to, path="nobody")}, "gone"),
    ],
)
def test_a_ticket_that_does_not_fit_is_refused_and_writes_nothing(
    changed: dict[str, object], message: str
) -> None:
    ticket = replace(GOOD, **changed)
    _, written, told = prefilled(ticket)
    assert not written
    (one,) = told
    assert one.ticket == ticket.id
    assert message in one.error


def test_the_same_ticket_twice_is_served_once() -> None:
    engine, written, _ = prefilled(GOOD)
    engine.handle(Push(GOOD))
    (again,) = engine.exchange.news()
    assert isinstance(again, Pushed)
    assert "not here" in again.error
    assert len(written) == len(GOOD.blocks)


def test_the_same_ticket_again_while_it_is_served_is_not_heard() -> None:
    """Else its receiver would be told that nobody writes, while somebody does."""
    engine, written, told = prefilled(GOOD, twice=True)
    assert [(one.ticket, one.error) for one in told] == [(GOOD.id, "")]
    assert len(written) == len(GOOD.blocks)
    engine.step()
    assert_engine_empty(engine)


def test_a_request_that_goes_away_is_no_failure_of_the_wire() -> None:
    """Its blocks are free when nothing writes from them any more."""
    wire: list[Callable[[], None]] = []
    engine, _, told = prefilled(GOOD, wire=wire)
    assert not told
    engine.handle(Cancel("r"))
    assert not engine.exchange.news()
    wire.pop()()
    (gone,) = engine.exchange.news()
    assert isinstance(gone, Pushed)
    assert "went away" in gone.error
    assert engine.report().transfer == TransferReport(sent_bytes=gone.sent)
    engine.step()
    assert_engine_empty(engine)


def test_a_receiver_that_is_not_there_is_one() -> None:
    engine, _, _ = prefilled(replace(GOOD, to=replace(GOOD.to, path="nobody")))
    transfer = engine.report().transfer
    assert transfer is not None
    assert transfer.failed == 1
