"""KV write-back of finished requests from decode to prefill workers: the next turn of a chat begins with
blocks that the decode worker has and the prefill worker lacks.

request ends ──▶ WritebackManager ──▶ prefill worker: Submit "decode", the full blocks of prompt and output
Reserved ──────▶                  ──▶ decode worker:  Submit "return", with the reservation for missing blocks
Pushed ────────▶                  ──▶ prefill worker: Join without outputs: the blocks stay in its cache

No client waits for it, so a write-back that fails is dropped.
"""

from collections.abc import Iterator, Mapping
from itertools import count

from streamserve.fleet.events import Open, Send
from streamserve.fleet.requests import OpenRequest
from streamserve.fleet.worker_state import Topology, WorkerState
from streamserve.protocol.messages import RETURN, Cancel
from streamserve.protocol.sampling import SamplingParams

PRIORITY = 1 << 30
"""The lowest priority."""
MAX_WRITEBACKS = 16
"""The maximum number of concurrent write-backs; further ones are skipped."""
PARAMS = SamplingParams(temperature=0.0, seed=0, max_tokens=1 << 30, ignore_eos=True)


class WritebackManager:
    """All write-backs in progress, by names that no client's request has."""

    def __init__(self, topology: Topology) -> None:
        self._prefill_of = (
            dict(zip(topology.decode, topology.prefill, strict=True)) if topology.paired else {}
        )
        self._numbers = count(1)
        self.open: dict[str, OpenRequest] = {}

    def begin(self, request: OpenRequest, workers: Mapping[str, WorkerState], now: float) -> Iterator[Send]:
        """Start the write-back of a finished request's full blocks to its prefill worker. Skipped for
        requests with more than one choice, which are rarely chats, and for those that ended with their first
        token, whose KV the prefill worker has already."""
        writer = request.decode or request.worker
        owner = request.worker if request.decode else self._prefill_of.get(writer or "")
        outputs = list(request.outputs.values())
        if (
            not writer
            or not owner
            or len(outputs) != 1
            or len(self.open) >= MAX_WRITEBACKS
            or request.isolated
        ):
            return
        if not (workers[writer].ready and workers[owner].ready) or workers[owner].draining:
            return
        size, prompt = workers[writer].block_size, request.opened.prompt
        tokens = prompt + outputs[0][:-1]  # the last token has no KV
        tokens = tokens[: len(tokens) // size * size]
        if len(tokens) // size <= len(prompt) // size:
            return
        number = next(self._numbers)
        opened = Open(
            f"{RETURN}{number}", tokens, PARAMS, priority=PRIORITY, cache_salt=request.opened.cache_salt,
            adapter=request.opened.adapter,
        )  # fmt: skip
        back = OpenRequest(opened, now, -number, writer, owner)
        back.resumed = {0: []}
        back.open_choices, back.transferring = {0}, {0}
        self.open[opened.request] = back
        yield Send(owner, back.submit("decode"))

    def reserved(self, name: str) -> Iterator[Send]:
        """Ask the worker that has the KV to send it, now that the blocks are reserved."""
        back = self.open.get(name)
        if back and back.worker:
            yield Send(back.worker, back.submit("return"))

    def complete(self, name: str) -> Iterator[Send]:
        """Record that a write-back is complete."""
        self.open.pop(name, None)
        yield from ()

    def drop(self, name: str, ended_worker: str = "") -> Iterator[Send]:
        """Drop a write-back at all its workers except `ended_worker`."""
        back = self.open.pop(name, None)
        if back:
            for worker in sorted(back.workers - {ended_worker}):
                yield Send(worker, Cancel(name))

    def lose(self, worker: str) -> Iterator[Send]:
        """Drop the write-backs of a worker whose process has ended."""
        for name in [name for name, back in self.open.items() if worker in back.workers]:
            yield from self.drop(name, worker)
