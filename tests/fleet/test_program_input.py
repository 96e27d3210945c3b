"""The pipe to the standard input of a forked program works in both event loops."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from streamserve.fleet.child_process import InputPipe

Run = Callable[[Coroutine[Any, Any, Any]], Any]
either_loop = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@either_loop
def test_it_is_closed_once_all_data_was_written(run: Run) -> None:
    descriptor, writing = os.pipe()
    parts = [bytes([number]) * 100_000 for number in range(8)]

    async def write() -> bytes:
        stdin = InputPipe(os.fdopen(writing, "wb", buffering=0))
        for part in parts:
            stdin.write(part)
        stdin.close()
        stdin.write(b"too late")
        return await asyncio.to_thread(reading.read)

    with os.fdopen(descriptor, "rb") as reading:
        assert run(write()) == b"".join(parts)


@either_loop
def test_it_is_closed_when_nothing_reads_it_any_more(run: Run) -> None:
    reading, descriptor = os.pipe()

    async def write() -> None:
        stdin = InputPipe(pipe := os.fdopen(descriptor, "wb", buffering=0))
        stdin.write(bytes(1 << 20))
        await asyncio.sleep(0.01)
        assert not pipe.closed
        os.close(reading)
        for _ in range(2000):
            if pipe.closed:
                break
            await asyncio.sleep(0.01)
        assert pipe.closed
        stdin.write(b"too late")
        stdin.close()
        assert not asyncio.get_running_loop().remove_writer(descriptor)

    run(write())
