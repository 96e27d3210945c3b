"""The events that a Fleet processes and the commands it returns, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from streamserve.protocol.adapters import Adapter
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import Event, FromWorker, ToWorker
from streamserve.protocol.sampling import SamplingParams

Ending = Literal["fault", "outside", "unclear"]
"""How a process ended. `fault`: by itself, or the kernel killed it for want of memory. `outside`: it was
asked to. `unclear`: it was killed, or lost, which may be due to what it computed."""


@dataclass(frozen=True, slots=True)
class Open:
    """A client's new request. `params.seed` and `params.max_tokens` are set. `open`, `answer_early`, `tail`
    and `version` describe a prompt stream, as in Submit; it is routed as a prompt of at least
    `expected_tokens`. `adapter`: the fingerprint of its LoRA adapter. `keep`: its digest, under which workers
    keep its outputs for a next head, and this one looks for those of the head before; empty: neither."""

    request: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    open: bool = False
    answer_early: bool = False
    tail: int = 0
    version: int = 0
    adapter: str = ""
    expected_tokens: int = 0
    keep: bytes = b""


@dataclass(frozen=True)
class Edit:
    """A client's edit of its prompt stream: the first `retained` tokens stay, followed by `tokens`; the last
    `tail` of all are as in Submit. Versions ascend. With `finish` the prompt is complete and is
    answered, with `params` if given."""

    request: str
    version: int
    retained: int
    tokens: list[int]
    finish: bool = False
    params: SamplingParams | None = None
    tail: int = 0


@dataclass(frozen=True)
class Close:
    """A client cancels a request, or one choice of it."""

    request: str
    choice: int | None = None


@dataclass(frozen=True)
class Drain:
    """An operator starts draining a worker (`draining`: it gets no new requests) or ends that."""

    worker: str
    draining: bool


@dataclass(frozen=True)
class AddWorkers:
    """An operator adds workers with these names, which are free."""

    workers: tuple[str, ...]


@dataclass(frozen=True)
class RemoveWorkers:
    """An operator removes workers together: they get no new requests, and leave when they have none.
    Requests that they still have `within` so many seconds continue elsewhere."""

    workers: tuple[str, ...]
    within: float = inf


@dataclass(frozen=True)
class AddAdapter:
    """An operator loads a LoRA adapter at all workers."""

    adapter: Adapter


@dataclass(frozen=True)
class RemoveAdapter:
    """An operator unloads a LoRA adapter: it takes no new requests, and leaves with its last open one."""

    fingerprint: str


@dataclass(frozen=True)
class WorkerMessage:
    """A message from a worker's process. `incarnation` counts the starts of the process."""

    worker: str
    incarnation: int
    message: FromWorker


@dataclass(frozen=True)
class WorkerLost:
    """A worker's process ended, or could not be started. `suspects`: the attempts in its last step, which was
    in this `phase`; None if unknown. `report`: the name of its crash report, if it wrote one. Unless it is
    `dead`, it was only lost, may still write KV, and a WorkerDead follows. `ending`: whether its requests may
    be the cause."""

    worker: str
    incarnation: int
    reason: str
    suspects: frozenset[int] | None = None
    phase: str = ""
    report: str = ""
    dead: bool = True
    ending: Ending = "fault"


@dataclass(frozen=True)
class WorkerDead:
    """A worker's process that was lost does certainly not write any more."""

    worker: str
    incarnation: int


@dataclass(frozen=True)
class Heartbeat:
    """A worker's sign of life from its journal, last updated `at` a time. It last made progress at
    `moved_at`: a `phase` began, or a layer was computed. The longest part of the phase that shows no progress
    is predicted to take `predicted` seconds."""

    at: float
    phase: str = ""
    moved_at: float = 0.0
    predicted: float = 0.0

    @property
    def in_step(self) -> bool:
        """Whether the worker computes something; it waits, or only KV is transferred, otherwise."""
        return self.phase not in ("", "transfer")


@dataclass(frozen=True)
class Tick:
    """Time passed: check for workers that are silent or hang. `beats` are the workers' signs of life, by name
    and incarnation."""

    beats: Mapping[tuple[str, int], Heartbeat] = field(default_factory=dict)


@dataclass(frozen=True)
class Send:
    """Send a message to a worker."""

    worker: str
    message: ToWorker


@dataclass(frozen=True)
class Deliver:
    """Deliver new events to a client. `last` says that the request is over."""

    request: str
    events: list[Event]
    last: bool


@dataclass(frozen=True)
class Refuse:
    """Tell a client that its request cannot be served (any more)."""

    request: str
    error: RequestError


@dataclass(frozen=True)
class Start:
    """Start a worker's process for the `incarnation`-th time, in `after` seconds."""

    worker: str
    incarnation: int
    after: float = 0.0


@dataclass(frozen=True)
class Kill:
    """Kill a worker's process, and why; its loss is reported like any other."""

    worker: str
    reason: str = ""


@dataclass(frozen=True)
class Retire:
    """End the process of a worker that was removed, if it runs or starts; its end is not reported."""

    worker: str
    incarnation: int


Operation = Drain | AddWorkers | RemoveWorkers | AddAdapter | RemoveAdapter
FleetEvent = Open | Edit | Close | Operation | WorkerMessage | WorkerLost | WorkerDead | Tick
Command = Send | Deliver | Refuse | Start | Kill | Retire
