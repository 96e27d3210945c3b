"""Accepts the connections of an HTTPS server, and counts each from its beginning.

asyncio's servers tell a protocol of a connection only after its TLS handshake. Clients that never begin one
would hold descriptors that no limit counts.

    accept ── within the limits ──▶ counted ──▶ handshake ──▶ HttpConnection, which is counted already
           └─ beyond ─────────────▶ at most REFUSED_AT_ONCE handshakes, for the reply 503; others are closed
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

from streamserve.api.http.connection import HttpConnection

_log = logging.getLogger(__name__)

REFUSED_AT_ONCE = 16
"""Maximum number of handshakes at once beyond the limits. Their descriptors are not counted."""

PAUSE_SECONDS = 0.1
"""Seconds without new connections after the process ran out of descriptors."""


class TlsListener:
    """Accepts connections of a listening socket until `close`, in a running event loop. Has the methods of an
    asyncio server that uvicorn calls. A handshake may take `seconds`."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, new: Callable[[], HttpConnection], seconds: float
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._context = context
        self._new = new
        self._seconds = seconds
        self._refused = 0
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Accept no more connections, and end the handshakes."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended."""
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                await self._accept_one()
            except OSError:  # the client is gone already, or there are no descriptors
                await asyncio.sleep(PAUSE_SECONDS)
            except Exception:
                _log.exception("a connection could not be accepted")
                await asyncio.sleep(PAUSE_SECONDS)

    async def _accept_one(self) -> None:
        """Accept a connection, and begin its handshake. Raises OSError."""
        loop = asyncio.get_running_loop()
        accepted, client = await loop.sock_accept(self._socket)
        connection = self._new()
        within = connection.enter(client[:2])
        if not within and self._refused >= REFUSED_AT_ONCE:
            accepted.close()
            return
        self._refused += not within
        task = loop.create_task(self._shake(accepted, connection, within))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _shake(self, accepted: socket.socket, connection: HttpConnection, within: bool) -> None:
        """Make a connection's TLS handshake. If it fails, the connection does not count any more."""
        shaken = False
        try:
            with contextlib.suppress(OSError):  # TLS errors and timeouts are OSErrors too
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: connection, accepted, ssl=self._context, ssl_handshake_timeout=self._seconds
                )
                shaken = True
        finally:
            self._refused -= not within
            if not shaken:
                connection.leave()
                accepted.close()
