import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from streamserve.api.generator import Generator
from streamserve.api.http.connection import Timeouts
from streamserve.api.settings import ApiSettings
from streamserve.llm.async_llm import AsyncLLM
from streamserve.settings.resolve import resolve
from tests.api.serving import Served, served, until
from tests.checkpoints import make_checkpoint

READ_SECONDS = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A real server with the real engine. Even the longest answers of its model are short."""
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=128)

    async def start() -> Generator:
        llm = AsyncLLM(
            resolve(str(folder), {"served_model_name": ["tiny"], "threads": 1, "num_blocks": 1024})
        )
        await llm.start()
        return llm

    settings = ApiSettings(stream_ttl=2.0, batch_folder=str(tmp_path_factory.mktemp("batches")))
    with served(start, settings, Timeouts(read=READ_SECONDS)) as running:
        yield running


@contextmanager
def nothing_left(server: Served) -> Iterator[None]:
    """Assert after the block that a good request is answered, and that no request, KV block, task or socket
    is left."""
    answers(server)
    before = _tasks(), _sockets()
    yield
    answers(server)
    until(lambda: server.active_sequences() == 0 and server.llm.report().blocks_live == 0)
    until(lambda: _tasks() <= before[0] and _sockets() <= before[1], seconds=30)


def answers(server: Served) -> None:
    """Assert that a good request gets a good answer."""
    reply = server.post("/v1/completions", prompt="hi", max_tokens=2, ignore_eos=True)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 2


def _tasks() -> int:
    gc.collect()
    return sum(type(item) is asyncio.Task and not item.done() for item in gc.get_objects())


def _sockets() -> int:
    return len(psutil.Process().net_connections("tcp"))
