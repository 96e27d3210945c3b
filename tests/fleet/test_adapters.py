"""Requests with a LoRA adapter go to workers that have it."""

from msgspec.structs import replace

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Command, Send, WorkerLost, WorkerMessage
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.worker_state import unified
from streamserve.protocol.adapters import Adapter
from streamserve.protocol.messages import AdapterLoaded, Submit
from tests.fleet.fakes import OPEN, READY

ADAPTER = Adapter("a", "/adapters/a", "hash")
CHANGED = AdapterLoaded("hash", "/adapters/a: its files have changed")
ONE, TWO = "unified-0", "unified-1"


def restarted(workers: int) -> Fleet:
    """Return a fleet whose workers had the adapter. The first one was restarted, and loads it again."""
    fleet = Fleet(FleetConfig(topology=unified(workers), adapters=(ADAPTER,)))
    fleet.start(0.0)
    for name in fleet.config.topology.names:
        fleet.handle(WorkerMessage(name, 1, READY), 0.0)
        fleet.handle(WorkerMessage(name, 1, AdapterLoaded("hash")), 0.0)
    fleet.handle(WorkerLost(ONE, 1, "asked to end", ending="outside"), 1.0)
    fleet.handle(WorkerMessage(ONE, 2, READY), 2.0)
    return fleet


def targets(commands: list[Command]) -> set[str]:
    return {each.worker for each in commands if isinstance(each, Send) and isinstance(each.message, Submit)}


def asked(fleet: Fleet, adapter: str, begin: str) -> set[str]:
    """Open requests; return the workers that they are sent to."""
    opened = [replace(OPEN, request=f"{begin}{number}", adapter=adapter) for number in range(6)]
    return set().union(*(targets(fleet.handle(each, 3.0)) for each in opened))


def test_a_worker_that_loads_an_adapter_gets_its_requests_afterwards() -> None:
    fleet = restarted(2)
    assert asked(fleet, "hash", "while") == {TWO}
    assert ONE in asked(fleet, "", "base")
    fleet.handle(WorkerMessage(ONE, 2, AdapterLoaded("hash")), 4.0)
    assert ONE in asked(fleet, "hash", "after")


def test_a_worker_that_cannot_load_an_adapter_again_gets_none_of_its_requests() -> None:
    fleet = restarted(2)
    fleet.handle(WorkerMessage(ONE, 2, CHANGED), 4.0)
    assert asked(fleet, "hash", "adapted") == {TWO}
    assert ONE in asked(fleet, "", "base")
    fleet.handle(
        WorkerLost(ONE, 2, "asked to end", ending="outside"), 5.0
    )  # the old files may be back when it is ready again
    fleet.handle(WorkerMessage(ONE, 3, READY), 6.0)
    fleet.handle(WorkerMessage(ONE, 3, AdapterLoaded("hash")), 6.0)
    assert targets(fleet.handle(WorkerLost(TWO, 1, "asked to end", ending="outside"), 7.0)) == {ONE}


def test_an_answer_of_the_last_worker_with_an_adapter_waits_for_it() -> None:
    fleet = restarted(2)
    fleet.handle(WorkerMessage(ONE, 2, CHANGED), 4.0)
    assert targets(fleet.handle(replace(OPEN, adapter="hash"), 4.0)) == {TWO}
    assert targets(fleet.handle(WorkerLost(TWO, 1, "asked to end", ending="outside"), 5.0)) == set()
    assert targets(fleet.handle(WorkerMessage(TWO, 2, READY), 6.0)) == {TWO}


def test_a_request_that_waits_is_sent_when_another_worker_has_loaded_its_adapter() -> None:
    fleet = restarted(2)
    fleet.handle(WorkerLost(TWO, 1, "asked to end", ending="outside"), 3.0)
    assert targets(fleet.handle(replace(OPEN, adapter="hash"), 4.0)) == set()
    assert targets(fleet.handle(WorkerMessage(ONE, 2, AdapterLoaded("hash")), 5.0)) == {ONE}


def test_the_only_worker_gets_them_and_refuses_what_it_cannot_compute() -> None:
    fleet = restarted(1)
    assert asked(fleet, "hash", "while") == {ONE}
    fleet.handle(WorkerMessage(ONE, 2, CHANGED), 4.0)
    assert asked(fleet, "hash", "after") == {ONE}
