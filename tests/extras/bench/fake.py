"""Small servers with scripted replies, such as errors that a real server does not produce on demand."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextmanager
def answering(handler: Handler) -> Iterator[str]:
    """Run a server that handles every POST with `handler`; yields its URL."""
    ready: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        app, stop = web.Application(), asyncio.Event()
        app.router.add_post("/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        ready.set_result((f"http://127.0.0.1:{port}", asyncio.get_running_loop(), stop))
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    url, loop, stop = ready.result(timeout=30)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=30)


def streaming(*parts: bytes | float) -> Handler:
    """Return a handler that sends the bytes and sleeps the seconds of a script in order."""

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for part in parts:
            await (reply.write(part) if isinstance(part, bytes) else asyncio.sleep(part))
        return reply

    return handle
