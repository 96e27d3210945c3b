"""Request ids: the client's X-Request-Id or a generated one, in the reply and in the logs."""

import logging
import re
import secrets
import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamserve.api.http.error_format import ErrorFormat, choose_format
from streamserve.system.logs import ACCESS, REQUEST_ID

HEADER = "X-Request-Id"
_VALID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_MAX_PATH = 256

_access = logging.getLogger(ACCESS)


class RequestIds:
    """Middleware that assigns each request its id, and logs it at its end if the access log is enabled.

    A client's id has 1 to 128 letters, digits and ._:- and begins with a letter or digit; others are
    replaced. It also chooses a request's error format from `formats`: later middleware may refuse the
    request.
    """

    def __init__(self, app: ASGIApp, formats: Sequence[ErrorFormat] = ()) -> None:
        self._app = app
        self._formats = formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        format = choose_format(scope, self._formats) if scope["type"] in ("http", "websocket") else None
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get(HEADER, "")
        request_id = client_id if _VALID.fullmatch(client_id) else f"req-{secrets.token_hex(12)}"
        started, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                if format:
                    headers[format.id_header] = request_id
            await send(message)

        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST_ID.set(
            request_id
        )  # Not reset: each request runs in a separate task, and its failures are logged last.
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if _access.isEnabledFor(logging.INFO):
                _log(scope, status, time.perf_counter() - started)


def _log(scope: Scope, status: int, seconds: float) -> None:
    """Write one line of the access log.

    The path is written as it was sent, still percent-encoded, so it has no line breaks. Queries are left
    out.
    """
    path = scope["raw_path"].decode("ascii", "replace")[:_MAX_PATH]
    client = (scope.get("client") or ("-",))[0]
    fields = {"method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 4)}
    _access.info("%s %s %d in %.3f s from %s", *fields.values(), client, extra={**fields, "client": client})
