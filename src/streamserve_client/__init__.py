"""A client that sends prompts in pieces: `PromptStream`, and `AsyncPromptStream` for event loops.

    with PromptStream("http://127.0.0.1:8000", query="What is it about?", max_tokens=64) as stream:
        for document in documents:
            stream.append(document)
        print(stream.finish()["choices"][0]["text"])

The distribution `streamserve-client` has this package alone. It needs httpx, and nothing of the server.
"""

import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, suppress
from typing import Any

import httpx

__all__ = ["AsyncPromptStream", "ChunkRef", "PromptStream", "StreamError", "Withdrawn"]

RETRIES = 3
"""Number of attempts at a request whose reply was lost. All have the same Idempotency-Key, so it is executed
once."""


class Withdrawn:
    """Voids the pieces of an early answer that were received so far: the prompt now has version `version`."""

    def __init__(self, version: int) -> None:
        self.version = version


ChunkRef = str | int
"""A chunk's id, or its index among all chunks."""


class StreamError(Exception):
    """The server refused a request: `status`, message, and the stream's `version` if an edit was made for
    another version."""

    def __init__(self, status: int, message: str, version: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.version = version


class _Edits:
    """Builds the chunk operations that both clients send."""

    @staticmethod
    def append(text: str) -> dict[str, Any]:
        return {"op": "append", "text": text}

    @staticmethod
    def insert(text: str, before: ChunkRef) -> dict[str, Any]:
        return {"op": "insert", "text": text, **_chunk_ref(before)}

    @staticmethod
    def replace(chunk: ChunkRef, text: str) -> dict[str, Any]:
        return {"op": "replace", "text": text, **_chunk_ref(chunk)}

    @staticmethod
    def remove(chunk: ChunkRef) -> dict[str, Any]:
        return {"op": "remove", **_chunk_ref(chunk)}


class PromptStream:
    """A prompt stream on a server. `fields` are the fields of POST /v1/streams: query, template, messages,
    sampling.

    Methods raise StreamError if the server refuses a request, httpx.TransportError if it cannot be reached.
    `version` is the latest known version. `edit` sends several operations at once.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout: float = 600.0, **fields: Any):
        self._http = httpx.Client(base_url=_root(base_url), headers=_headers(api_key), timeout=timeout)
        try:
            created = self._send("POST", "/v1/streams", fields)
        except BaseException:
            self._http.close()
            raise
        self.id: str = created["id"]
        self.version: int = created["version"]

    def append(self, text: str) -> str:
        """Append a chunk at the end; return its id."""
        return self.edit(_Edits.append(text))[0]

    def insert(self, text: str, before: ChunkRef) -> str:
        """Insert a chunk before another; return its id."""
        return self.edit(_Edits.insert(text, before))[0]

    def replace(self, chunk: ChunkRef, text: str) -> None:
        """Replace the text of a chunk."""
        self.edit(_Edits.replace(chunk, text))

    def remove(self, chunk: ChunkRef) -> None:
        """Remove a chunk."""
        self.edit(_Edits.remove(chunk))

    def edit(self, *operations: dict[str, Any]) -> list[str]:
        """Apply operations, all or none; return the ids of the chunks that they created, changed or
        removed."""
        body = {"version": self.version, "operations": list(operations)}
        reply = self._send("PATCH", f"/v1/streams/{self.id}", body)
        self.version = reply["version"]
        return list(reply["chunks"])

    def state(self) -> dict[str, Any]:
        """Return version, chunks, tokens, and the number of tokens that are already computed."""
        return _checked(self._http.get(f"/v1/streams/{self.id}"))

    def finish(self) -> dict[str, Any]:
        """Finish the prompt and return the answer in the format of completions or chats. If the early answer
        is being read, the reply only confirms that it is final."""
        return self._send("POST", f"/v1/streams/{self.id}/finish", {"stream": False})

    def answer(self) -> Iterator[str]:
        """Finish the prompt and yield the answer's text in pieces. Leaving the loop early cancels the
        answer."""
        for piece in self._read("finish", {"stream": True}):
            if isinstance(piece, str):
                yield piece

    def early(self) -> Iterator[str | Withdrawn]:
        """Yield the answer to the current prompt while it is edited, until the prompt is finished. Needs
        answer_early=True. At a Withdrawn, discard the pieces before it. Leaving the loop ends the stream."""
        return self._read("answer", {})

    def _read(self, action: str, body: dict[str, Any]) -> Iterator[str | Withdrawn]:
        with self._http.stream("POST", f"/v1/streams/{self.id}/{action}", json=body) as reply:
            if reply.status_code != 200:
                reply.read()
                _checked(reply)
            for line in reply.iter_lines():
                yield from _pieces(line)

    def close(self) -> None:
        """Delete the stream, unless it was answered, and close the connection. If the server cannot be
        reached, it deletes the stream later (stream_ttl)."""
        if not self._http.is_closed:
            with suppress(httpx.TransportError):
                self._http.delete(f"/v1/streams/{self.id}")
            self._http.close()

    def __enter__(self) -> "PromptStream":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _send(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        for retries_left in reversed(range(RETRIES)):
            try:
                return _checked(self._http.request(method, path, json=body, headers=headers))
            except httpx.TransportError:
                if not retries_left:
                    raise
        raise AssertionError("unreachable")


class AsyncPromptStream:
    """`PromptStream` for an event loop. It is opened by `async with`, or by `open`."""

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout: float = 600.0, **fields: Any):
        self._http = httpx.AsyncClient(base_url=_root(base_url), headers=_headers(api_key), timeout=timeout)
        self._fields = fields
        self.id = ""
        self.version = 0

    async def open(self) -> None:
        """Create the stream on the server."""
        try:
            created = await self._send("POST", "/v1/streams", self._fields)
        except BaseException:
            await self._http.aclose()
            raise
        self.id, self.version = created["id"], created["version"]

    async def append(self, text: str) -> str:
        """Append a chunk at the end; return its id."""
        return (await self.edit(_Edits.append(text)))[0]

    async def insert(self, text: str, before: ChunkRef) -> str:
        """Insert a chunk before another; return its id."""
        return (await self.edit(_Edits.insert(text, before)))[0]

    async def replace(self, chunk: ChunkRef, text: str) -> None:
        """Replace the text of a chunk."""
        await self.edit(_Edits.replace(chunk, text))

    async def remove(self, chunk: ChunkRef) -> None:
        """Remove a chunk."""
        await self.edit(_Edits.remove(chunk))

    async def edit(self, *operations: dict[str, Any]) -> list[str]:
        """Apply operations, all or none; return the ids of the chunks that they created, changed or
        removed."""
        body = {"version": self.version, "operations": list(operations)}
        reply = await self._send("PATCH", f"/v1/streams/{self.id}", body)
        self.version = reply["version"]
        return list(reply["chunks"])

    async def state(self) -> dict[str, Any]:
        """Return version, chunks, tokens, and the number of tokens that are already computed."""
        return _checked(await self._http.get(f"/v1/streams/{self.id}"))

    async def finish(self) -> dict[str, Any]:
        """Finish the prompt and return the answer in the format of completions or chats. If the early answer
        is being read, the reply only confirms that it is final."""
        return await self._send("POST", f"/v1/streams/{self.id}/finish", {"stream": False})

    async def answer(self) -> AsyncIterator[str]:
        """Finish the prompt and yield the answer's text in pieces. Leaving the loop early cancels the
        answer."""
        async with aclosing(self._read("finish", {"stream": True})) as pieces:
            async for piece in pieces:
                if isinstance(piece, str):
                    yield piece

    def early(self) -> AsyncGenerator[str | Withdrawn, None]:
        """Yield the answer to the current prompt while it is edited, until the prompt is finished. Needs
        answer_early=True. At a Withdrawn, discard the pieces before it. Leaving the loop ends the stream."""
        return self._read("answer", {})

    async def _read(self, action: str, body: dict[str, Any]) -> AsyncGenerator[str | Withdrawn, None]:
        path = f"/v1/streams/{self.id}/{action}"
        async with self._http.stream("POST", path, json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                _checked(reply)
            async for line in reply.aiter_lines():
                for piece in _pieces(line):
                    yield piece

    async def close(self) -> None:
        """Delete the stream, unless it was answered, and close the connection. If the server cannot be
        reached, it deletes the stream later (stream_ttl)."""
        if not self._http.is_closed:
            with suppress(httpx.TransportError):
                await self._http.delete(f"/v1/streams/{self.id}")
            await self._http.aclose()

    async def __aenter__(self) -> "AsyncPromptStream":
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _send(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        for retries_left in reversed(range(RETRIES)):
            try:
                return _checked(await self._http.request(method, path, json=body, headers=headers))
            except httpx.TransportError:
                if not retries_left:
                    raise
        raise AssertionError("unreachable")


def _root(base_url: str) -> str:
    """Return the base URL without a trailing /v1. Other clients require it; this client accepts it."""
    return base_url.rstrip("/").removesuffix("/v1")


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _chunk_ref(chunk: ChunkRef) -> dict[str, Any]:
    return {"index": chunk} if isinstance(chunk, int) else {"chunk": chunk}


def _checked(reply: httpx.Response) -> dict[str, Any]:
    """Return the reply's body. Raises StreamError if the reply is a refusal, or of another server."""
    try:
        body = reply.json()
    except ValueError:
        body = None
    if reply.is_success and isinstance(body, dict):
        return body
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):  # of a proxy
        error = {"message": reply.text[:300]}
    raise StreamError(reply.status_code, str(error.get("message")), error.get("version"))


def _pieces(line: str) -> Iterator[str | Withdrawn]:
    """Yield the texts of one line of an event stream, or a Withdrawn. Raises StreamError for an error
    event."""
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        raise StreamError(500, event["error"]["message"])
    if event.get("object") == "prompt_stream.withdrawn":
        yield Withdrawn(event["version"])
    for choice in event.get("choices", ()):
        text = choice.get("text") or choice.get("delta", {}).get("content")
        if text:
            yield text
