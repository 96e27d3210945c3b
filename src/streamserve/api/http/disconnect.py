"""Cancel work when its client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from streamserve.protocol.errors import RequestError

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` while the client is connected; return or raise what it does.

    If the client disconnects first, cancels `work` at once and raises ClientDisconnect. The request's body
    must have been read from `receive` before. Requests are only cancelled by a server that is shutting down:
    that becomes a RequestError, so that the client gets a reply.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect()
        return working.result()
    except asyncio.CancelledError:
        raise RequestError("the server is shutting down", status=503, retry_after=5.0) from None
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
