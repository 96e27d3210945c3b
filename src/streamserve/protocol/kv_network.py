"""Messages between a worker that sends KV over TCP and the one that owns the blocks.

writer DEALER ── Write, one frame for each row ──▶ ROUTER owner     both with the fleet's key, by CURVE
              ◀── Written ────────────────────────
"""

from typing import Annotated

import msgspec

MAX_ROWS = 64
"""Rows of a Write, each in a frame."""
MAX_FRAME_BYTES = 4 << 20
MAX_WRITE_BYTES = 1 << 20
"""Bytes of a Write, unless a single block of a row has more."""
MAX_HEADER_BYTES = 256 << 10

Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class KVNetwork(msgspec.Struct, frozen=True):
    """How workers reach each other's KV over TCP: a worker listens at its `address`. The key pair, as bytes,
    is that of the fleet, and new with each of its starts. `always` sends over TCP within a machine too."""

    address: str
    public: bytes
    secret: bytes
    always: bool = False

    def __repr__(self) -> str:
        return f"KVNetwork({self.address})"


class Write(msgspec.Struct, frozen=True, array_like=True):
    """Write rows from `first` on of the `blocks` of a reservation, in the memory of that `incarnation`.
    `number` is the writer's own."""

    incarnation: Annotated[str, msgspec.Meta(max_length=64)]
    reservation: Annotated[str, msgspec.Meta(max_length=256)]
    number: Index
    first: Index
    blocks: Annotated[list[Index], msgspec.Meta(max_length=32768)]


class Written(msgspec.Struct, frozen=True, array_like=True):
    """A Write was done, or with an `error` not."""

    number: Index
    error: Annotated[str, msgspec.Meta(max_length=500)] = ""


_encoder = msgspec.msgpack.Encoder()
_write = msgspec.msgpack.Decoder(Write)
_written = msgspec.msgpack.Decoder(Written)


def encode(message: Write | Written) -> bytes:
    """Return one message as msgpack bytes."""
    return _encoder.encode(message)


def decode_write(data: bytes) -> Write:
    """Decode a Write. Raises msgspec.DecodeError on anything else."""
    return _write.decode(data)


def decode_written(data: bytes) -> Written:
    """Decode a Written. Raises msgspec.DecodeError on anything else."""
    return _written.decode(data)
