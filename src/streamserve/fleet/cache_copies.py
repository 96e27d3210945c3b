"""Cache copies between the halves of a stream pair: full blocks of KV that one worker has cached go into the
other's cache.

begin    ──▶ CacheCopies ──▶ owner:  Submit "decode", which reserves blocks for what it lacks
Reserved ──▶             ──▶ writer: Submit "return", with the reservation
Pushed   ──▶             ──▶ owner:  Join without outputs: the blocks stay in its cache

No client waits for a copy, so one that fails is dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from streamserve.fleet.events import Command, Open, Send
from streamserve.fleet.request_status import RequestStatus
from streamserve.fleet.requests import OpenRequest
from streamserve.protocol.messages import Cancel, RequestKind
from streamserve.protocol.sampling import SamplingParams

NAMES = "\0"
"""First character of the names of copies; no client's request has such a name."""
PRIORITY = 1 << 30
"""The lowest priority: requests of clients come first."""
PARAMS = SamplingParams(temperature=0.0, seed=0, max_tokens=0)


@dataclass
class CacheCopies:
    """The copies in progress, by names that no client's request has. Messages to workers are appended to
    `commands`."""

    commands: list[Command]
    open: dict[str, OpenRequest] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def begin(
        self,
        kind: RequestKind,
        tokens: list[int],
        cache_salt: str,
        writer: str,
        owner: str,
        now: float,
        adapter: str = "",
    ) -> str:
        """Begin a copy of the KV of `tokens`, which fill whole blocks. `adapter` is the LoRA adapter they
        were computed with, or "". Return the copy's name."""
        number = next(self._numbers)
        name = f"{NAMES}{kind.value}/{number}"
        opened = Open(name, tokens, PARAMS, priority=PRIORITY, cache_salt=cache_salt, adapter=adapter)
        copy = OpenRequest(opened, now, -number, open_choices=frozenset({0}), kind=kind)
        copy.assign(writer, owner)
        copy.become(RequestStatus.RESERVING)
        self.open[name] = copy
        self.commands.append(Send(owner, copy.submit("decode")))
        return name

    def reserved(self, name: str) -> None:
        """Ask the worker that has the KV to send it, now that the blocks are reserved."""
        copy = self.open.get(name)
        if copy and copy.worker:
            self.commands.append(Send(copy.worker, copy.submit("return")))

    def count(self, kind: RequestKind) -> int:
        return sum(copy.kind is kind for copy in self.open.values())

    def complete(self, name: str) -> None:
        """Record that a copy is complete."""
        self.open.pop(name, None)

    def drop(self, name: str, ended_worker: str = "") -> None:
        """Drop a copy at all its workers except `ended_worker`."""
        copy = self.open.pop(name, None)
        if copy:
            for worker in sorted(copy.workers - {ended_worker}):
                self.commands.append(Send(worker, Cancel(name)))

    def of(self, worker: str) -> list[str]:
        """Return the names of a worker's copies."""
        return [name for name, copy in self.open.items() if worker in copy.workers]
