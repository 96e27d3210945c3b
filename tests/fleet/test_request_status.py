"""A request's status changes only by legal transitions, through a single method."""

from itertools import product

import pytest

from streamserve.fleet.request_status import TRANSITIONS, RequestStatus, RequestStatusError
from streamserve.fleet.requests import NO_CHOICES, OpenRequest
from tests.fleet.fakes import OPEN

LEGAL = [(before, after) for before in TRANSITIONS for after in TRANSITIONS[before]]
ILLEGAL = [change for change in product(RequestStatus, repeat=2) if change not in LEGAL]


def make_request(status: RequestStatus) -> OpenRequest:
    return OpenRequest(OPEN, 0.0, 1, status=status, open_choices=frozenset({0}))


@pytest.mark.parametrize(("before", "after"), LEGAL)
def test_a_legal_change_is_made(before: RequestStatus, after: RequestStatus) -> None:
    request = make_request(before)
    request.become(after)
    assert request.status is after


@pytest.mark.parametrize(("before", "after"), ILLEGAL)
def test_an_illegal_change_raises_and_is_not_made(before: RequestStatus, after: RequestStatus) -> None:
    request = make_request(before)
    with pytest.raises(RequestStatusError, match=f"request r cannot become {after.label}"):
        request.become(after)
    assert request.status is before


def test_every_status_can_be_reached() -> None:
    reached = {RequestStatus.WAITING}
    for _ in RequestStatus:
        reached |= {after for before in reached for after in TRANSITIONS[before]}
    assert reached == set(RequestStatus)


@pytest.mark.parametrize("decode", [None, "decode-0"])
def test_a_next_attempt_forgets_the_workers(decode: str | None) -> None:
    request = make_request(RequestStatus.WAITING)
    request.assign("prefill-0", decode)
    assert request.status is RequestStatus.QUEUED
    assert request.transferring == (request.open_choices if decode else NO_CHOICES)
    request.next_attempt(2)
    assert (request.status, request.attempt, request.workers) == (RequestStatus.WAITING, 2, set())


def test_an_assigned_request_is_not_assigned_again() -> None:
    request = make_request(RequestStatus.WAITING)
    request.assign("unified-0", None)
    with pytest.raises(RequestStatusError):
        request.assign("unified-1", None)
    assert request.worker == "unified-0"
