"""What a Fleet is told and what it wants done, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import Event, FromWorker, ToWorker
from streamserve.protocol.sampling import SamplingParams


@dataclass(frozen=True)
class Open:
    """A client wants tokens. `params.seed` and `params.max_tokens` are set. `open`, `answer_early`, `tail`
    and `version`: of a prompt that is still arriving, as in Submit."""

    request: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    open: bool = False
    answer_early: bool = False
    tail: int = 0
    version: int = 0


@dataclass(frozen=True)
class Edit:
    """A client changes its open prompt: the first `keep` tokens still hold, then come `tokens`, the last
    `tail` of all as in Submit. Versions ascend. With `finish` the prompt is complete, and is answered by
    `params` if there are any."""

    request: str
    version: int
    keep: int
    tokens: list[int]
    finish: bool = False
    params: SamplingParams | None = None
    tail: int = 0


@dataclass(frozen=True)
class Close:
    """A client wants no more of a request, or of one choice of it."""

    request: str
    choice: int | None = None


@dataclass(frozen=True)
class Rest:
    """An operator wants a worker to get no new requests (`draining`), or to get them again."""

    worker: str
    draining: bool


@dataclass(frozen=True)
class Heard:
    """A worker's process sent a message. `incarnation` counts the times it was started."""

    worker: str
    incarnation: int
    message: FromWorker


@dataclass(frozen=True)
class Lost:
    """A worker's process ended, or could not be started. `suspects`: the attempts that were in its last
    step, in this `phase` of it; None if that is not known. `report`: the name of its crash report, if it
    left one."""

    worker: str
    incarnation: int
    reason: str
    suspects: frozenset[int] | None = None
    phase: str = ""
    report: str = ""


@dataclass(frozen=True)
class Beat:
    """A sign of life that a worker leaves without saying anything, last `at` a time. In a `phase` of a step
    it last moved on at `moved_at`, and `predicted` seconds are expected of the step in all."""

    at: float
    phase: str = ""
    moved_at: float = 0.0
    predicted: float = 0.0


@dataclass(frozen=True)
class Tick:
    """Time passed: look whether a worker has gone silent, or hangs. `beats` are those of the workers, with
    their incarnation, where there are any."""

    beats: Mapping[tuple[str, int], Beat] = field(default_factory=dict)


@dataclass(frozen=True)
class Send:
    """Send a message to a worker."""

    worker: str
    message: ToWorker


@dataclass(frozen=True)
class Deliver:
    """Give a client what is new. `last` says that the request is over."""

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
    """End a worker's process; its loss is reported like any other."""

    worker: str


FleetEvent = Open | Edit | Close | Rest | Heard | Lost | Tick
Command = Send | Deliver | Refuse | Start | Kill
