"""Received data is parsed one slice at a time, in turn with other connections."""

import asyncio
import gc
import weakref

import pytest

from streamserve.api.http.received import ReceivedData
from streamserve.api.http.slices import Slices
from streamserve.api.http.timer import Timer


class Parser:
    """A connection that parses slices of 4 bytes and buffers at most `limit`."""

    def __init__(self, slices: Slices, log: list[bytes], limit: int = 1000) -> None:
        self.received = ReceivedData(slices)
        self.timer = Timer(0.01)
        self.log = log
        self.limit = limit
        self.expired = 0

    def take(self, data: bytes) -> None:
        self.received.add(data)
        self.received.schedule(self.parse_next)

    def parse_next(self) -> bool:
        if self.received.size:
            self.log.append(self.received.pop(4))
            self.limit -= 1
        return self.limit > 0

    def time_out(self) -> None:
        self.expired += 1


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_data_is_parsed_in_order_and_in_slices() -> None:
    log: list[bytes] = []
    parser = Parser(Slices(), log)
    parser.take(b"0123456789")
    parser.take(b"ab")
    assert (parser.received.size, log) == (12, [])
    await settled()
    assert (parser.received.size, log) == (0, [b"0123", b"4567", b"89", b"ab"])


async def test_connections_take_turns() -> None:
    slices, log = Slices(), list[bytes]()
    Parser(slices, log).take(b"aaaaAAAA")
    Parser(slices, log).take(b"bbbbBBBB")
    await settled()
    assert log == [b"aaaa", b"bbbb", b"AAAA", b"BBBB"]


async def test_parsing_stops_until_it_is_scheduled_again() -> None:
    log: list[bytes] = []
    parser = Parser(Slices(), log, limit=1)
    parser.take(b"01234567")
    await settled()
    assert (parser.received.size, log) == (4, [b"0123"])
    parser.limit = 1
    parser.received.schedule(parser.parse_next)
    parser.received.schedule(parser.parse_next)
    await settled()
    assert log == [b"0123", b"4567"]


async def test_data_that_is_cleared_is_not_parsed() -> None:
    log: list[bytes] = []
    parser = Parser(Slices(), log)
    parser.take(b"0123")
    parser.received.clear()
    await settled()
    assert (parser.received.size, log) == (0, [])
    parser.take(b"4567")
    await settled()
    assert log == [b"4567"]


async def test_nothing_can_be_taken_when_nothing_is_waiting() -> None:
    with pytest.raises(IndexError):
        ReceivedData(Slices()).pop(1)


async def test_a_timer_that_is_started_twice_expires_once() -> None:
    parser = Parser(Slices(), [])
    parser.timer.start(parser.time_out)
    parser.timer.start(parser.time_out)
    await asyncio.sleep(0.05)
    assert parser.expired == 1
    parser.timer.start(parser.time_out)
    parser.timer.stop()
    parser.timer.stop()
    await asyncio.sleep(0.03)
    assert parser.expired == 1


async def test_a_closed_connection_is_freed_at_once() -> None:
    """A closed connection does not wait for the garbage collector: its buffers may be large, and are no
    longer charged."""
    parser = Parser(Slices(), [])
    parser.take(b"0123")
    parser.timer.start(parser.time_out)
    await settled()
    parser.timer.stop()
    freed = weakref.ref(parser)
    gc.disable()
    try:
        del parser
        assert freed() is None
    finally:
        gc.enable()
