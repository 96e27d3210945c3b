"""The event loop of an LLM ends without pending tasks, also after interrupted calls."""

import asyncio
import threading
from concurrent.futures import Future

import pytest

from streamserve.llm.llm import _run_and_close


def test_tasks_of_interrupted_calls_are_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_run_and_close, args=(loop,))
    thread.start()
    left: Future[None] = asyncio.run_coroutine_threadsafe(asyncio.sleep(1000), loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    assert left.cancelled()
    assert loop.is_closed()
    assert "Task was destroyed" not in caplog.text
