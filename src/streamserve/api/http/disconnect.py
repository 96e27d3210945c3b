"""Work that ends when its client leaves."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from streamserve.protocol.errors import RequestError

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. If the client leaves first, `work` is cancelled at once and
    ClientDisconnect is raised. The request's body must have been read from `receive` before.

    Only a server that leaves cancels its requests: that becomes a RequestError, so that the client is told.
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
