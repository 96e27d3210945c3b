"""No input of any route blocks the event loop: other requests continue meanwhile.

The tests measure the processor time of the loop's thread in one callback, which does not depend on other
programs.
"""

import asyncio
import gc
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from starlette.routing import Route, WebSocketRoute

from streamserve.api.app import create_app
from streamserve.api.generator import Generator
from streamserve.api.ops.loop_lag import SECONDS, measure_lag
from streamserve.api.settings import ApiSettings
from streamserve.api.unsupported_routes import unsupported_endpoints
from streamserve.llm.async_llm import AsyncLLM
from streamserve.settings.resolve import resolve
from tests.api.conftest import CONTEXT
from tests.api.largest import LARGEST, Sizes
from tests.api.serving import ScriptedGenerator, Served, served, until
from tests.conftest import Scale

BOUND = 0.25
"""Maximum seconds of processor time in one callback: a few times the slowest measured value, as other
machines are slower. The inputs that this test guards against took seconds."""


@dataclass
class Watched:
    """A server whose event loop is measured: the longest callback, in seconds of its thread's processor
    time."""

    server: Served | None = None
    thread: int = 0
    longest: float = 0.0
    what: str = ""
    callbacks: int = field(default=0)

    def run(self, run: Callable[[asyncio.Handle], None], handle: asyncio.Handle) -> None:
        if threading.get_ident() != self.thread:
            run(handle)
            return
        what, start = repr(handle), time.thread_time()
        run(handle)
        seconds = time.thread_time() - start
        self.callbacks += 1
        if seconds > self.longest:
            self.longest, self.what = seconds, what


@pytest.fixture(scope="module")
def watched(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A measured server with the real engine. As in a server's process, garbage collection excludes old
    objects."""
    found = Watched()
    folder = tmp_path_factory.mktemp("batches")

    async def start() -> Generator:
        found.thread = threading.get_ident()
        flags = {"threads": 1, "num_blocks": 2048, "max_requests": 4096}
        llm = AsyncLLM(resolve(str(checkpoint), flags))
        await llm.start()
        return llm

    run = asyncio.Handle._run
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", lambda handle: found.run(run, handle))
        with served(start, ApiSettings(batch_folder=str(folder))) as server:
            found.server = server
            yield found
    gc.unfreeze()


def test_each_route_has_its_largest_input(generator: ScriptedGenerator) -> None:
    unsupported = {endpoint.route.path for endpoint in unsupported_endpoints()}
    routes = set()
    for route in create_app(generator).routes:
        assert isinstance(route, Route | WebSocketRoute)
        if route.path not in unsupported:
            methods = route.methods or set() if isinstance(route, Route) else {"WEBSOCKET"}
            routes |= {f"{method} {route.path}" for method in methods - {"HEAD"}}
    assert routes == set(LARGEST)


@pytest.mark.parametrize("route", sorted(LARGEST))
def test_no_input_holds_the_event_loop(
    watched: Watched, route: str, scale: Scale, record: Callable[..., None]
) -> None:
    assert watched.server
    sizes = Sizes(CONTEXT, 1.0 if scale.full else 0.25)
    watched.longest, watched.callbacks = 0.0, 0
    LARGEST[route](watched.server, sizes)
    if route == "POST /admin/drain":
        watched.server.http.post("/admin/resume")
    until(lambda: watched.callbacks > 1)  # The last callback is counted after its reply has arrived.
    record(milliseconds=math.ceil(1000 * watched.longest))
    assert watched.longest < BOUND, f"{watched.longest:.3f} s of the loop: {watched.what}"


async def test_a_pause_is_measured() -> None:
    lag: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    measuring = asyncio.create_task(measure_lag(lag.set_result))
    await asyncio.sleep(0)  # the pause begins after this request
    time.sleep(3 * SECONDS)  # noqa: ASYNC251 (the pause)
    assert await lag > 1.9 * SECONDS
    measuring.cancel()


def test_a_server_measures_its_lag(watched: Watched) -> None:
    assert watched.server
    server = watched.server
    count = server.metric("event_loop_lag_seconds_count")
    until(lambda: server.metric("event_loop_lag_seconds_count") > count)
