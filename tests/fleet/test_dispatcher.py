"""A request's record and the loads of its workers always change together."""

import pytest

from streamserve.fleet.dispatcher import Dispatcher
from streamserve.fleet.events import Command, Refuse, Send
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.requests import OpenRequest
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import Cancel
from tests.fleet.fakes import OPEN, W, started


@pytest.fixture
def fleet() -> Fleet:
    return started(max_attempts=2)


@pytest.fixture
def dispatcher(fleet: Fleet) -> Dispatcher:
    return fleet.dispatcher


@pytest.fixture
def request_(fleet: Fleet, dispatcher: Dispatcher) -> OpenRequest:
    dispatcher.open(OPEN, 0.0)
    assert [command.worker for command in taken(fleet) if isinstance(command, Send)] == [W]
    return dispatcher.requests[OPEN.request]


def taken(fleet: Fleet) -> list[Command]:
    """Return the fleet's commands, and clear them."""
    commands = fleet.commands.copy()
    fleet.commands.clear()
    return commands


def load(fleet: Fleet) -> tuple[int, int]:
    worker = fleet.workers[W]
    return len(worker.prompts), len(worker.incoming)


def test_a_placed_request_is_counted_at_its_worker(fleet: Fleet, request_: OpenRequest) -> None:
    assert request_.worker == W
    assert load(fleet) == (1, 1)


def test_a_withdrawn_request_waits_for_its_next_attempt(
    fleet: Fleet, dispatcher: Dispatcher, request_: OpenRequest
) -> None:
    attempt = request_.attempt
    dispatcher.withdraw(request_)
    assert taken(fleet) == [Send(W, Cancel(OPEN.request))]
    assert (request_.worker, load(fleet)) == (None, (0, 0))
    assert request_.attempt > attempt
    dispatcher.place_waiting(1.0)
    assert [command.worker for command in taken(fleet) if isinstance(command, Send)] == [W]


def test_a_worker_that_has_ended_gets_no_cancel(
    fleet: Fleet, dispatcher: Dispatcher, request_: OpenRequest
) -> None:
    dispatcher.withdraw(request_, ended_worker=W)
    assert taken(fleet) == []


def test_a_request_is_refused_after_its_last_attempt(
    fleet: Fleet, dispatcher: Dispatcher, request_: OpenRequest
) -> None:
    dispatcher.retry(request_, "a fault", 1.0)
    assert not any(isinstance(command, Refuse) for command in taken(fleet))
    dispatcher.retry(request_, "a fault", 2.0)
    *_, refusal = taken(fleet)
    assert isinstance(refusal, Refuse)
    assert str(refusal.error) == "this request was lost 2 times: a fault"
    assert (dispatcher.requests, load(fleet)) == ({}, (0, 0))


def test_a_refused_request_leaves_nothing(
    fleet: Fleet, dispatcher: Dispatcher, request_: OpenRequest
) -> None:
    error = RequestError("no")
    dispatcher.refuse(request_, error)
    assert taken(fleet) == [Refuse(OPEN.request, error)]
    assert (dispatcher.requests, load(fleet)) == ({}, (0, 0))
