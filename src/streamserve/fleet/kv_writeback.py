"""Finished answers on their way back: the next turn of a chat begins with what the decode worker has and the
prefill worker lacks.

request ends ──▶ Returns ──▶ prefill worker: Submit "decode", the full blocks of prompt and answer
Reserved ──────▶         ──▶ decode worker:  Submit "return", and the ticket for what the other lacks
Pushed ────────▶         ──▶ prefill worker: Join without outputs: the blocks stay in its cache

Nobody waits for it, so whatever goes wrong is just left.
"""

from collections.abc import Iterator
from itertools import count

from streamserve.fleet.events import Open, Send
from streamserve.fleet.requests import OpenRequest
from streamserve.fleet.worker_state import Topology, WorkerState
from streamserve.protocol.messages import RETURN, Cancel
from streamserve.protocol.sampling import SamplingParams

PRIORITY = 1 << 30
"""Behind everybody."""
MOST = 16
"""Answers on their way back at once; further ones stay where they are."""
PARAMS = SamplingParams(temperature=0.0, seed=0, max_tokens=1 << 30, ignore_eos=True)


class Returns:
    """All answers that are being returned, by names that no client's request has."""

    def __init__(self, topology: Topology) -> None:
        self._back = dict(zip(topology.decode, topology.prefill, strict=True)) if topology.paired else {}
        self._numbers = count(1)
        self.open: dict[str, OpenRequest] = {}

    def begin(self, request: OpenRequest, workers: dict[str, WorkerState], now: float) -> Iterator[Send]:
        """A request has ended well: its full blocks go to its prefill worker. What has more than one choice
        is hardly a chat, and what ended with its first token left the prefill worker with all."""
        writer = request.decode or request.worker
        owner = request.worker if request.decode else self._back.get(writer or "")
        answers = list(request.outputs.values())
        if not writer or not owner or len(answers) != 1 or len(self.open) >= MOST or request.isolated:
            return
        if not (workers[writer].ready and workers[owner].ready) or workers[owner].draining:
            return
        size, prompt = workers[writer].block_size, request.opened.prompt
        tokens = prompt + answers[0][:-1]  # there is no KV of the last one
        tokens = tokens[: len(tokens) // size * size]
        if len(tokens) // size <= len(prompt) // size:
            return
        number = next(self._numbers)
        opened = Open(
            f"{RETURN}{number}", tokens, PARAMS, priority=PRIORITY, cache_salt=request.opened.cache_salt
        )
        back = OpenRequest(opened, now, -number, writer, owner)
        back.resumed = {0: []}
        back.open_choices, back.handing = {0}, {0}
        self.open[opened.request] = back
        yield Send(owner, back.submit("decode"))

    def reserved(self, name: str) -> Iterator[Send]:
        """Its blocks are held: who has the KV is to send it."""
        back = self.open.get(name)
        if back and back.worker:
            yield Send(back.worker, back.submit("return"))

    def over(self, name: str) -> Iterator[Send]:
        """All of it has landed: there is nothing left to do."""
        self.open.pop(name, None)
        yield from ()

    def drop(self, name: str, gone: str = "") -> Iterator[Send]:
        """Leave one, wherever it is, but at the worker that is gone."""
        back = self.open.pop(name, None)
        if back:
            for worker in sorted(back.workers - {gone}):
                yield Send(worker, Cancel(name))

    def lose(self, worker: str) -> Iterator[Send]:
        """A worker's process has ended."""
        for name in [name for name, back in self.open.items() if worker in back.workers]:
            yield from self.drop(name, worker)
