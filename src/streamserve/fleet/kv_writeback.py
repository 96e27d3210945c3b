"""KV write-back of finished requests from decode to prefill workers: the next turn of a chat then finds the
blocks of its history in the prefill worker's cache."""

from collections.abc import Mapping

from streamserve.fleet.availability import Availability
from streamserve.fleet.cache_copies import CacheCopies
from streamserve.fleet.requests import OpenRequest
from streamserve.fleet.worker_state import WorkerState
from streamserve.protocol.messages import RequestKind

MAX_WRITEBACKS = 16
"""The maximum number of concurrent write-backs; further write-backs are skipped."""


class WritebackManager:
    """Decides which finished requests are written back. A write-back is a cache copy."""

    def __init__(self, availability: Availability, copies: CacheCopies) -> None:
        self._availability = availability
        self._copies = copies

    def begin(self, request: OpenRequest, workers: Mapping[str, WorkerState], now: float) -> None:
        """Start the write-back of a finished request's full blocks to its prefill worker. Skipped for
        requests with several choices, which are rarely chats, and if the prefill worker has all full blocks
        already."""
        writer = request.decode or request.worker
        owner = request.worker if request.decode else self._availability.topology.prefill_of(writer or "")
        outputs = list(request.outputs.values())
        if (
            not writer
            or not owner
            or len(outputs) != 1
            or self._copies.count(RequestKind.WRITEBACK) >= MAX_WRITEBACKS
            or request.isolated
        ):
            return
        if not (workers[writer].ready and workers[owner].ready) or workers[owner].draining:
            return
        size, prompt = workers[writer].block_size, request.opened.prompt
        tokens = prompt + outputs[0][:-1]  # the last output token was never computed: it has no KV
        tokens = tokens[: len(tokens) // size * size]
        if len(tokens) // size > len(prompt) // size:
            opened = request.opened
            self._copies.begin(
                RequestKind.WRITEBACK, tokens, opened.cache_salt, writer, owner, now, opened.adapter
            )
