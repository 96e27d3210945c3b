"""Messages between a worker that sends KV over TCP and the worker that owns the blocks.

writer DEALER ── Write, one frame for each row ──▶ ROUTER owner     both with the fleet's key, by CURVE
              ◀── Written ────────────────────────
"""

from collections.abc import Callable
from typing import Annotated

import msgspec

MAX_ROWS = 64
"""Maximum number of rows in a Write; each row is one frame."""
MAX_FRAME_BYTES = 4 << 20
MAX_WRITE_BYTES = 1 << 20
"""Maximum bytes of a Write, unless one block of a row has more."""
MAX_HEADER_BYTES = 256 << 10

Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class KVNetwork(msgspec.Struct, frozen=True):
    """How workers reach each other's KV over TCP. A worker listens at its `address`. The fleet's key pair, as
    bytes, is new at each start of the fleet. `always`: send over TCP within a machine, too."""

    address: str
    public: bytes
    secret: bytes
    always: bool = False

    def __repr__(self) -> str:
        return f"KVNetwork({self.address})"


class Write(msgspec.Struct, frozen=True, array_like=True):
    """Write rows into the `blocks` of a reservation, from row `first` on, in the memory of this
    `incarnation`. `number` identifies the Write for its writer."""

    incarnation: Annotated[str, msgspec.Meta(max_length=64)]
    reservation: Annotated[str, msgspec.Meta(max_length=256)]
    number: Index
    first: Index
    blocks: Annotated[list[Index], msgspec.Meta(max_length=32768)]


class Written(msgspec.Struct, frozen=True, array_like=True):
    """A Write was done; with an `error` it was not."""

    number: Index
    error: Annotated[str, msgspec.Meta(max_length=500)] = ""


encode: Callable[[Write | Written], bytes] = msgspec.msgpack.Encoder().encode
decode_write = msgspec.msgpack.Decoder(Write).decode
decode_written = msgspec.msgpack.Decoder(Written).decode
"""The decoders raise msgspec.DecodeError for anything else."""
