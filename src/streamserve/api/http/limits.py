"""Limits on one request, and on all requests together. Each error names the field and the limit."""

from collections.abc import Sequence

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from streamserve.api.http.memory import Charge, MemoryAccount
from streamserve.protocol.errors import RequestError
from streamserve.protocol.sampling import SamplingParams

MAX_CHOICES = 1024
"""Maximum number of choices of one request, over all its prompts."""

_CHARGE = "memory_charge"


def check_choices(params: Sequence[SamplingParams]) -> None:
    """Raise RequestError if a request asks for too many choices. `params` are the parameters of its
    prompts."""
    choices = sum(each.n for each in params)
    if choices > MAX_CHOICES:
        raise RequestError(
            f"n is {params[0].n} for {len(params)} prompts: at most {MAX_CHOICES} choices in total "
            "are allowed",
            field="n",
        )


class RequestMemory:
    """Middleware that opens a charge of the memory account for each request (`charge_of`), and closes it at
    the end."""

    def __init__(self, app: ASGIApp, account: MemoryAccount) -> None:
        self._app = app
        self._account = account

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        with self._account.charge() as charge:
            scope.setdefault("state", {})[_CHARGE] = charge
            await self._app(scope, receive, send)


def charge_of(connection: HTTPConnection) -> Charge:
    """Return the memory charge of a request or a WebSocket."""
    charge: Charge = connection.scope["state"][_CHARGE]
    return charge
