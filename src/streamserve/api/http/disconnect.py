"""Cancel work when its client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from streamserve.protocol.errors import RequestError

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` while the client is connected; return its result, or raise its error.

    If the client disconnects first, `work` is cancelled and ClientDisconnect is raised. The request's body
    must have been read from `receive` before. Only a server that is shutting down cancels requests: a
    cancellation becomes a RequestError, so that the client gets a reply.
    """
    task = asyncio.ensure_future(work)
    disconnection = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait({task, disconnection}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect()
        return task.result()
    except asyncio.CancelledError:
        raise RequestError("the server is shutting down", status=503, retry_after=5.0) from None
    finally:
        task.cancel()
        disconnection.cancel()
        await asyncio.gather(task, disconnection, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
