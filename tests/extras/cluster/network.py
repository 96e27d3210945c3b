"""A TCP proxy whose link can be delayed, stalled, cut and half-opened, without any privilege."""

import asyncio
import contextlib


class Link:
    """Forwards connections to a port of this machine, `target`. `port` is the proxy's."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.delay = 0.0
        self.connections = 0
        self.target = target
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._down = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server
        self._server.close()
        self.break_connections()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def break_connections(self) -> None:
        """Close all connections; new ones are accepted."""
        for writer in list(self._writers):
            writer.transport.abort()

    def cut(self) -> None:
        """Forward nothing and accept nothing until `restore`; neither side gets an error."""
        self._flowing.clear()
        self._down = True

    def stall(self) -> None:
        """Forward nothing until `restore`."""
        self._flowing.clear()

    def restore(self) -> None:
        self._down = False
        self._flowing.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._down:
            writer.transport.abort()
            return
        self.connections += 1
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def read() -> None:
            while data := await source.read(1 << 16):
                await queue.put((loop.time() + self.delay, data))
            await queue.put((loop.time(), b""))

        reading = asyncio.create_task(read())
        try:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self._flowing.wait()
                if not data:
                    break
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            reading.cancel()
            with contextlib.suppress(OSError, RuntimeError):
                sink.close()
            self._writers.discard(sink)
