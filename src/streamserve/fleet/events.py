"""The events that a Fleet processes and the commands it returns, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from streamserve.protocol.adapters import Adapter
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import Event, FromWorker, GenerateRequest, ToWorker
from streamserve.protocol.sampling import SamplingParams

Ending = Literal["fault", "outside", "unclear"]
"""How a process ended:

- fault: by itself, or killed by the kernel for lack of memory.
- outside: it was asked to end.
- unclear: it was killed or lost; the requests that it computed may be the cause.
"""


class Open(GenerateRequest, frozen=True, kw_only=True):
    """A client's new request. A prompt stream is routed as a prompt of at least `expected_tokens`. If `keep`
    is set, the outputs that workers have kept under this digest, for an earlier head, are looked for."""

    expected_tokens: int = 0


@dataclass(frozen=True)
class ClientEdit:
    """A client's edit of its prompt stream: the first `retained` tokens stay, and `tokens` follow them.
    `tail` is as in GenerateRequest. Versions ascend. With `finish`, the prompt is complete and is answered,
    with `params` if given."""

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
    """An operator starts draining a worker (`draining`), so that it gets no new requests, or ends
    draining."""

    worker: str
    draining: bool


@dataclass(frozen=True)
class AddWorkers:
    """An operator adds workers with these names, which must be free."""

    workers: tuple[str, ...]


@dataclass(frozen=True)
class RemoveWorkers:
    """An operator removes workers together: they get no new requests, and leave when they have none. Requests
    that still run after `within` seconds continue at other workers."""

    workers: tuple[str, ...]
    within: float = inf


@dataclass(frozen=True)
class AddAdapter:
    """An operator loads a LoRA adapter at all workers."""

    adapter: Adapter


@dataclass(frozen=True)
class RemoveAdapter:
    """An operator unloads a LoRA adapter: it takes no new requests, and is unloaded after its last open
    request."""

    fingerprint: str


@dataclass(frozen=True)
class WorkerMessage:
    """A message from a worker's process. `incarnation` counts the starts of the process."""

    worker: str
    incarnation: int
    message: FromWorker


@dataclass(frozen=True)
class WorkerLost:
    """A worker's process ended, or could not be started.

    - `suspects`: the attempts in its last step; None if unknown. `phase`: the phase of this step.
    - `report`: the name of its crash report, if it wrote one.
    - `dead`: whether it certainly writes no more KV; if not, a WorkerDead follows.
    - `ending`: whether its requests may be the cause.
    """

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
    """A worker's process that was lost is now certain to write no more KV."""

    worker: str
    incarnation: int


@dataclass(frozen=True)
class Heartbeat:
    """A worker's sign of life, read from its journal, which was updated `at` a time. `moved_at` is its latest
    progress: the begin of a `phase`, or the end of a layer. `predicted` is the expected number of seconds of
    the longest part of the phase that shows no progress."""

    at: float
    phase: str = ""
    moved_at: float = 0.0
    predicted: float = 0.0

    @property
    def in_step(self) -> bool:
        """Whether the worker computes a step. Otherwise it waits, or only transfers KV."""
        return self.phase not in ("", "transfer")


@dataclass(frozen=True)
class Tick:
    """Time passed: check for workers that are silent or stuck. `beats` are the workers' signs of life by name
    and incarnation."""

    beats: Mapping[tuple[str, int], Heartbeat] = field(default_factory=dict)


@dataclass(frozen=True)
class Send:
    """Send a message to a worker."""

    worker: str
    message: ToWorker


@dataclass(frozen=True)
class Deliver:
    """Deliver new events to a client. `last`: the request is over."""

    request: str
    events: list[Event]
    last: bool


@dataclass(frozen=True)
class Refuse:
    """Tell a client that its request cannot be served, or cannot be continued."""

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
    """Kill a worker's process for a `reason`; its loss is reported like any other."""

    worker: str
    reason: str = ""


@dataclass(frozen=True)
class Retire:
    """End the process of a worker that was removed, even if it is just being started. Its end is not
    reported."""

    worker: str
    incarnation: int


Operation = Drain | AddWorkers | RemoveWorkers | AddAdapter | RemoveAdapter
FleetEvent = Open | ClientEdit | Close | Operation | WorkerMessage | WorkerLost | WorkerDead | Tick
Command = Send | Deliver | Refuse | Start | Kill | Retire
