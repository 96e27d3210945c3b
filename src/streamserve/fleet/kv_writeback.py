"""KV write-back of finished requests from decode to prefill workers: the next turn of a chat then finds the
blocks of its history in the prefill worker's cache."""

from streamserve.fleet.availability import Availability
from streamserve.fleet.cache_copies import CacheCopies
from streamserve.fleet.requests import OpenRequest
from streamserve.protocol.messages import RequestKind

MAX_WRITEBACKS = 16
"""The maximum number of concurrent write-backs; further write-backs are skipped."""


def begin_writeback(
    request: OpenRequest, availability: Availability, copies: CacheCopies, now: float
) -> None:
    """Start to copy the full KV blocks of a finished request to its prefill worker's cache. No copy is
    started if the prefill worker already has all full blocks, or if the request has several choices: it is
    rarely a turn of a chat, so no later turn would use the blocks."""
    workers, writer = availability.workers, request.decode or request.worker
    owner = request.worker if request.decode else availability.topology.prefill_of(writer or "")
    outputs = list(request.outputs.values())
    if (
        not writer
        or not owner
        or len(outputs) != 1
        or copies.count(RequestKind.WRITEBACK) >= MAX_WRITEBACKS
        or request.isolated
    ):
        return
    if not (workers[writer].ready and workers[owner].ready) or workers[owner].draining:
        return
    size, opened = workers[writer].block_size, request.opened
    tokens = opened.prompt + outputs[0][:-1]  # the last output token was never computed: it has no KV
    tokens = tokens[: len(tokens) // size * size]
    if len(tokens) // size > len(opened.prompt) // size:
        copies.begin(RequestKind.WRITEBACK, tokens, opened.cache_salt, writer, owner, now, opened.adapter)
