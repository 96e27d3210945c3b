"""The memory account charges nothing beyond its limit, and releases every charge."""

import random

import pytest

from streamserve.api.http.memory import SMALL, MemoryAccount
from streamserve.protocol.errors import RequestError

MB = 1 << 20


def test_what_can_never_fit_gets_413_and_the_rest_429() -> None:
    account = MemoryAccount(16 * MB)
    first = account.charge()
    first.add(10 * MB)
    with pytest.raises(RequestError) as later:
        account.charge().add(5 * MB)
    assert (later.value.status, later.value.retry_after) == (429, 1.0)
    with pytest.raises(RequestError) as never:
        account.charge().add(13 * MB)
    assert (never.value.status, never.value.retry_after) == (413, None)
    assert account.held == 10 * MB


def test_the_last_quarter_is_for_small_requests() -> None:
    account = MemoryAccount(16 * MB)
    account.charge().add(12 * MB)
    with pytest.raises(RequestError):
        account.charge().add(SMALL + 1)
    small = [account.charge() for _ in range(4)]
    for charge in small:
        charge.add(SMALL)
    with pytest.raises(RequestError):
        account.charge().add(1)
    small[0].close()
    account.charge().add(1)


def test_everything_is_released() -> None:
    account, draw = MemoryAccount(64 * MB), random.Random(0)
    for _ in range(200):
        with account.charge() as charge:
            for _ in range(10):
                before = account.held
                try:
                    draw.choice([charge.add, charge.set])(draw.randrange(30 * MB))
                except RequestError:
                    assert account.held == before
                charge.release(draw.randrange(MB))
                assert 0 <= account.held <= account.limit
        charge.add(MB)  # closed: nothing is charged any more
        assert account.held == 0
    assert account.peak > 32 * MB
