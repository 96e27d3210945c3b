"""/v1/streams/ws: prompt streams over one WebSocket; they end with the connection.

    → {"request": "a", "method": "create", "body": {…}}
    ← {"request": "a", "status": 200, "body": {"id": …, "version": 0}}
    → {"request": "b", "method": "finish", "id": …, "body": {"stream": true}}
    ← {"request": "b", "event": {…}} …, at last {"request": "b", "status": 200}

Methods and bodies are as in the HTTP routes. `request` is chosen by the client and returned unchanged. Edits
are applied in order; an answer does not block later messages.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeVar

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from streamserve.api.http.auth import caller_of
from streamserve.api.http.body import checked, read_message
from streamserve.api.http.errors import as_request_error, error_body
from streamserve.api.http.ignored_fields import STRICT, OtherFields
from streamserve.api.http.sse import Emit
from streamserve.api.openai.conversation import LARGE_REQUEST
from streamserve.api.openai.other_fields import OTHER_IN_STREAMS
from streamserve.api.prompt_streams.context import StreamContext
from streamserve.api.prompt_streams.schemas import (
    AnswerRequest,
    DeletedReply,
    EditRequest,
    FinishRequest,
    StreamRequest,
)
from streamserve.protocol.errors import RequestError

T = TypeVar("T", bound=msgspec.Struct)

MAX_ANSWERS = 64
"""Maximum number of concurrent answers on one socket."""

_SEND_SECONDS = 30.0
"""A client that reads nothing for this many seconds is disconnected."""


class SocketCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a client."""

    request: str = ""
    method: Literal["create", "edit", "answer", "finish", "get", "delete"]
    id: str = ""
    idempotency_key: str | None = None
    body: dict[str, Any] = {}


async def socket(context: StreamContext, websocket: WebSocket) -> None:
    """Serve one client's WebSocket until it disconnects."""
    await websocket.accept()
    await _Conversation(websocket, context).run()


class _Conversation:
    """One client's WebSocket connection."""

    def __init__(self, websocket: WebSocket, context: StreamContext) -> None:
        self._websocket = websocket
        self._caller = caller_of(websocket)
        self._context = context.app
        self._streams = context.streams
        self._idempotency_cache = context.idempotency_cache
        self._created: set[str] = set()
        self._answers: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Process messages until the client disconnects; then end its streams."""
        try:
            while True:
                message = await self._websocket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                await self._handle(message.get("bytes") or (message.get("text") or "").encode())
                # Other connections' tasks run between messages that have already arrived.
                await asyncio.sleep(0)
        except (WebSocketDisconnect, TimeoutError, asyncio.CancelledError):
            return
        finally:
            for task in self._answers:
                task.cancel()
            await asyncio.gather(*self._answers, return_exceptions=True)
            for name in self._created & self._streams.names():
                await self._streams.delete(name, self._caller)

    async def _handle(self, data: bytes) -> None:
        call = None
        try:
            with self._context.memory.charge() as charge:
                charge.add(len(data))
                call = await read_message(data, self._context, charge, SocketCall)
                if call.method not in ("answer", "finish"):
                    await self._reply(call, await self._execute(call, charge.held))
                elif len(self._answers) >= MAX_ANSWERS:
                    raise RequestError(
                        f"{MAX_ANSWERS} answers are being generated on this socket, which is the limit",
                        status=429,
                    )
                else:
                    task = asyncio.create_task(self._answer(call))
                    self._answers.add(task)
                    task.add_done_callback(self._answers.discard)
        except (WebSocketDisconnect, TimeoutError):
            raise
        except Exception as error:
            await self._refuse(call, error)

    async def _execute(self, call: SocketCall, size: int) -> msgspec.Struct:
        """Execute `call`, whose message takes `size` bytes; return its reply."""
        streams, caller, key = self._streams, self._caller, call.idempotency_key
        if call.method == "create":
            body = await self._checked(call.body, StreamRequest, size, OTHER_IN_STREAMS)
            created = await self._idempotency_cache.run_once(
                caller, "create", key, body, lambda: streams.create(body, caller, size)
            )
            self._created.add(created.id)
            return created
        if call.method == "edit":
            edit, stream = await self._checked(call.body, EditRequest, size), streams.get(call.id, caller)
            return await self._idempotency_cache.run_once(
                caller, f"edit {call.id}", key, edit, lambda: stream.edit(edit)
            )
        if call.method == "get":
            return streams.get(call.id, caller).state()
        await streams.delete(call.id, caller)
        return DeletedReply(id=call.id)

    async def _checked(
        self, body: dict[str, Any], kind: type[T], size: int, others: OtherFields = STRICT
    ) -> T:
        return await self._context.side_thread.run_if(
            size > LARGE_REQUEST, lambda: checked(body, kind, others)
        )

    async def _answer(self, call: SocketCall) -> None:
        """Send an answer. The task is never awaited: if the client has disconnected, it ends without an
        error."""
        with suppress(WebSocketDisconnect, TimeoutError):
            try:
                await (self._answer_early(call) if call.method == "answer" else self._finish(call))
            except (WebSocketDisconnect, TimeoutError):
                return
            except Exception as error:
                await self._refuse(call, error)

    async def _answer_early(self, call: SocketCall) -> None:
        body = checked(call.body, AnswerRequest)
        await self._events(call, await self._streams.answer_early(call.id, self._caller, body))

    async def _finish(self, call: SocketCall) -> None:
        streams, caller, name = self._streams, self._caller, call.id
        body = checked(call.body, FinishRequest)
        if streams.wants_events(name, caller, body):
            await self._events(call, await streams.finish_streaming(name, caller, body))
            return
        work = self._idempotency_cache.run_once(
            caller, f"finish {name}", call.idempotency_key, body, lambda: streams.finish(name, caller, body)
        )
        await self._reply(call, msgspec.Raw(await work))

    async def _events(self, call: SocketCall, produce: Callable[[Emit], Awaitable[None]]) -> None:
        """Send the events of `produce`, then a final status."""

        async def emit(event: msgspec.Struct) -> None:
            await self._send({"request": call.request, "event": event})

        await produce(emit)
        await self._send({"request": call.request, "status": 200})

    async def _reply(self, call: SocketCall, body: Any) -> None:
        await self._send({"request": call.request, "status": 200, "body": body})

    async def _refuse(self, call: SocketCall | None, error: Exception) -> None:
        request_error = as_request_error(error)
        request = call.request if call else ""
        body = msgspec.Raw(error_body(request_error))
        await self._send({"request": request, "status": request_error.status, "body": body})

    async def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises WebSocketDisconnect if the client has disconnected, TimeoutError if it does not read.
        """
        async with self._lock, asyncio.timeout(_SEND_SECONDS):
            socket = self._websocket
            if WebSocketState.DISCONNECTED in (socket.client_state, socket.application_state):
                raise WebSocketDisconnect
            await self._websocket.send_text(msgspec.json.encode(message).decode())
