"""Messages between a head and the agents of other machines, over TCP with CURVE keys.

    agent ── Knock ─────▶ head      the versions
          ◀─ Challenge ──           a number used once, the head's epoch
          ── Register ──▶           the number, the machine
          ◀─ Welcome ────           a session, its lease
          ══ Packet, Alive ══       numbered messages; what was received, which renews the lease

After a lost connection, `Resume` continues a session whose lease has not ended. `Refused` says why a request
is not fulfilled. Packets carry the encoded commands of the launcher and messages of workers.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from streamserve.protocol.config import WorkerConfig

CLUSTER_VERSION = 1
MAX_CLUSTER_BYTES = 64 << 20
"""Maximum bytes of a message between head and agent. A connection that sends a larger message is closed."""
MAX_SMALL_BYTES = 4096
"""Maximum bytes of a message from a peer that is not registered."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
WorkerName = Annotated[str, msgspec.Meta(max_length=64)]
KeptName = Annotated[str, msgspec.Meta(max_length=32)]
Token = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Reason = Literal["version", "challenge", "connection", "session", "rate", "size", "unreadable", "unexpected"]


class Knock(msgspec.Struct, tag=True, frozen=True):
    """First message of a connection: the versions of this protocol and of the package."""

    version: Number
    release: Annotated[str, msgspec.Meta(max_length=64)]


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """Register with this number, which is valid once. The head with the highest `epoch` is the present
    head."""

    nonce: Token
    epoch: Number


class Machine(msgspec.Struct, frozen=True):
    """An agent's machine.

    - `name`: the machine's name, shown to people.
    - `identity`: processes with equal identities can share memory.
    - `address`: where other machines reach it.
    - `slots`: the maximum number of workers.
    - `kept`: workers of an earlier head that it still runs. It ends them if a worker of this head needs the
      slot.
    """

    name: Name
    identity: Annotated[str, msgspec.Meta(max_length=128)]
    address: Annotated[str, msgspec.Meta(max_length=256)]
    slots: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    kept: Annotated[tuple[KeptName, ...], msgspec.Meta(max_length=64)] = ()


class Register(msgspec.Struct, tag=True, frozen=True):
    """Join: offer a machine, with the number of the Challenge."""

    nonce: Token
    machine: Machine


class AgentWelcome(msgspec.Struct, tag=True, frozen=True):
    """The agent is registered. It must renew its session every `lease` seconds; otherwise its workers leave
    the head, or end."""

    session: Token
    lease: Annotated[float, msgspec.Meta(gt=0)]


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Continue a session on another connection."""

    session: Token


class ClusterRefused(msgspec.Struct, tag=True, frozen=True):
    """A request is not fulfilled, and why. "session": the session has ended. "connection": this connection
    has no session; resume one."""

    reason: Reason
    text: Text


class Packet(msgspec.Struct, tag=True, frozen=True):
    """Message `number` of a session in this direction, from 1 on."""

    number: Number
    body: bytes


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Sent by the agent several times a lease, and answered by the head.

    - `sent`: packets that the sender has sent; `received`: packets that it has received without a gap.
    - `missing`: the packets after `received` should be sent again.
    - `at`: the agent's clock when it asked, repeated in the answer; `clock`: the head's clock, in the
      answer.
    """

    sent: Number
    received: Number
    at: float
    clock: float = 0.0
    missing: bool = False


FromAgent = Knock | Register | Resume | Packet | Alive
FromHead = Challenge | AgentWelcome | ClusterRefused | Packet | Alive


class LaunchWorker(msgspec.Struct, tag=True, frozen=True):
    """Start a worker with this configuration. The agent adds the values that only its machine knows."""

    config: WorkerConfig


class ForwardedMessage(msgspec.Struct, tag=True, frozen=True):
    """A message to or from a worker's process, named NAME/INCARNATION."""

    worker: WorkerName
    data: bytes


class End(msgspec.Struct, tag=True, frozen=True):
    """End a worker's process: at once, or when it has not exited `grace` seconds after its Stop."""

    worker: WorkerName
    kill: bool
    grace: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


ToMachine = LaunchWorker | ForwardedMessage | End


class Started(msgspec.Struct, tag=True, frozen=True):
    """A worker's process runs."""

    worker: WorkerName
    pid: int


class Beat(msgspec.Struct, tag=True, frozen=True):
    """A worker's last sign of life, `age` seconds ago. Its last progress was `still` seconds ago."""

    worker: WorkerName
    age: float
    phase: Annotated[str, msgspec.Meta(max_length=32)]
    still: float
    predicted: float


class WorkerEnded(msgspec.Struct, tag=True, frozen=True):
    """A worker's process has ended, or could not be started: a fleet.events.WorkerLost from another
    machine."""

    worker: WorkerName
    reason: Text
    suspects: Annotated[list[int], msgspec.Meta(max_length=4096)] | None
    phase: Annotated[str, msgspec.Meta(max_length=32)] = ""
    report: Annotated[str, msgspec.Meta(max_length=256)] = ""
    ending: Literal["fault", "outside", "unclear"] = "fault"


FromMachine = Started | ForwardedMessage | Beat | WorkerEnded

encode: Callable[[FromAgent | FromHead | ToMachine | FromMachine], bytes] = msgspec.msgpack.Encoder().encode
decode_from_agent: Callable[[bytes], FromAgent] = msgspec.msgpack.Decoder(FromAgent).decode
decode_from_head: Callable[[bytes], FromHead] = msgspec.msgpack.Decoder(FromHead).decode
decode_to_machine: Callable[[bytes], ToMachine] = msgspec.msgpack.Decoder(ToMachine).decode
decode_from_machine: Callable[[bytes], FromMachine] = msgspec.msgpack.Decoder(FromMachine).decode
"""The decoders raise msgspec.DecodeError for anything else."""
