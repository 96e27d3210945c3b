"""Stream pushes: the KV of a prompt stream is copied to its decode worker while the prompt arrives.

Progress ──▶ StreamPushes.advance ──▶ a cache copy of the blocks computed so far, one at a time for a stream
Edit     ──▶ OpenRequest.edit: the retained prefix of a push remains valid
finish   ──▶ the decode worker reserves blocks for what its cache lacks: the last part of the prompt
the end  ──▶ StreamPushes.sweep: a push of a stream that is over, or tried again, is dropped

The decode worker's blocks are cached, not reserved: if memory is short, it evicts them for other requests,
and receives them again at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from streamserve.fleet.cache_copies import CacheCopies
from streamserve.fleet.request_status import RequestStatus
from streamserve.fleet.requests import OpenRequest
from streamserve.fleet.worker_state import WorkerState
from streamserve.protocol.messages import RequestKind

MIN_PUSH_BLOCKS = 4
"""Minimum number of new blocks for another push."""


@dataclass(frozen=True)
class _StreamPush:
    """A push for an attempt of `request`."""

    request: OpenRequest
    attempt: int

    @property
    def current(self) -> bool:
        return self.request.attempt == self.attempt


class StreamPushes:
    """The pushes in progress. A push is one of `copies`, between `workers`."""

    def __init__(self, workers: Mapping[str, WorkerState], copies: CacheCopies) -> None:
        self._workers = workers
        self._copies = copies
        self._pushes: dict[str, _StreamPush] = {}
        self.landed = 0
        """Pushes that have landed."""

    def advance(self, request: OpenRequest, now: float) -> None:
        """Push the blocks of an open prompt stream that were computed since the last push, if they are
        enough. The tail of the prompt is not pushed: it will move."""
        opened, arriving = request.opened, request.arriving
        writer, owner = request.worker, request.decode
        if not (opened.open and writer and owner) or opened.answer_early or request.isolated:
            return
        if arriving.push is not None or arriving.push_failed:
            return
        if not (self._workers[writer].ready and self._workers[owner].ready):
            return
        size = self._workers[owner].block_size
        blocks = min(arriving.computed, len(opened.prompt) - opened.tail) // size
        if blocks - arriving.pushed // size < MIN_PUSH_BLOCKS:
            return
        tokens = blocks * size
        prompt = opened.prompt[:tokens]
        name = self._copies.begin(
            RequestKind.STREAM_PUSH, prompt, request.cache_salt, writer, owner, now, opened.adapter
        )
        arriving.push, arriving.push_end = name, tokens
        self._pushes[name] = _StreamPush(request, request.attempt)

    def ended(self, name: str, landed: bool, now: float) -> None:
        """Record that a copy has landed or was dropped; then the next push of its stream may follow. A
        dropped push is tried again only after the next edit."""
        push = self._pushes.pop(name, None)
        if push is None:
            return
        self.landed += landed
        if push.current:
            arriving = push.request.arriving
            arriving.push = None
            if landed:
                arriving.pushed = arriving.push_end
            arriving.push_failed = not landed
            self.advance(push.request, now)

    def sweep(self, requests: Mapping[str, OpenRequest]) -> None:
        """Drop the pushes of streams that are no longer among the open `requests`, or have begun another
        attempt."""
        for name, push in list(self._pushes.items()):
            if not push.current or requests.get(push.request.name) is not push.request:
                del self._pushes[name]
                self._copies.drop(name)

    def finish(self, request: OpenRequest) -> None:
        """End the push of a stream that is finished, unless its blocks are being written."""
        name = request.arriving.push
        copy = self._copies.open.get(name or "")
        if name and copy and copy.status is RequestStatus.RESERVING:
            self._pushes.pop(name, None)
            self._copies.drop(name)
        request.arriving.push = None
