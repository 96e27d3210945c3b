"""Transfer reservations: permission to write KV into another worker's cache, and the messages about it.

    decode worker ── Reserved ──────▶ Fleet ── Push ────▶ prefill worker ═══ KV ═══▶ its blocks
                  ◀── Join, Release ──      ◀── Pushed ──
                  ── Deferred ──────▶       ── Hold ────▶

A reservation names its request, attempt and cache: so a stale or foreign reservation is refused, and cannot
cause tokens from another prompt. Its blocks are exclusive until it is closed: by `Join`, when all its KV has
arrived, or by `Release`, when its writer is known to write no more.
"""

from typing import Annotated

import msgspec

from streamserve.protocol.adapters import Fingerprint

LAYOUT_VERSION = 1
"""Version of the layout [layer][block][k|v][head][slot][vector]. Workers with different layouts do not
exchange KV."""

AttemptNumber = Annotated[int, msgspec.Meta(le=2**63 - 1)]
"""Number of an attempt of a request, unique in a fleet. Journals store it in 64 bits with a sign."""


class CacheAddress(msgspec.Struct, frozen=True):
    """The location and format of a worker's KV pool.

    - `path` opens its memory on this host: `size` bytes with this `inode`.
    - `fingerprint` covers weights, configuration, numerics, KV format, block size and layout version.
    - `base`, `agent`: for NIXL, the address of the memory in its process, and the metadata of its agent.
    - `host`, `endpoint`, `incarnation`: for other machines, the identity of its host, the address where it
      accepts writes, and which incarnation of the memory is meant.
    """

    path: str
    size: int
    num_blocks: int
    fingerprint: str
    inode: int = 0
    base: int = 0
    agent: bytes = b""
    host: str = ""
    endpoint: str = ""
    incarnation: str = ""


def kv_fingerprint(model: str, block_size: int, draft: str = "") -> str:
    """Return the fingerprint that two workers must share to exchange KV. `model` is the model's name
    (ModelInfo.kv_name), `draft` the draft model whose KV is stored with it, if any."""
    return "/".join(filter(None, (model, draft, str(block_size), str(LAYOUT_VERSION))))


class TransferReservation(msgspec.Struct, frozen=True):
    """Permission to write the KV of `request`'s positions `start` to `tokens` (exclusive) into `blocks` of
    the pool at `to`. The first block holds position `start`, a multiple of the block size. `choices` are the
    output choices of this sequence; `adapter` is the LoRA adapter that the KV must be computed with. `id` is
    unique in the lifetime of a fleet."""

    id: str
    request: str
    attempt: AttemptNumber
    choices: tuple[int, ...]
    tokens: int
    start: int
    blocks: list[int]
    to: CacheAddress
    adapter: Fingerprint = ""


class Push(msgspec.Struct, tag=True, frozen=True):
    """To the prefill worker: write the KV of the reservation's sequence into the reserved blocks, first the
    KV that is computed already, then the rest as it is computed."""

    reservation: TransferReservation


class Join(msgspec.Struct, tag=True, frozen=True):
    """A message to the worker that issued the reservation: the KV of the first `groups` KV cache groups has
    arrived, so the worker can start to decode.

    * `outputs`: the output tokens so far of each choice that the worker decodes. If there are none, the
      worker only keeps the KV in its prefix cache.
    * `began`: the time of each choice's first output token.
    """

    request: str
    attempt: AttemptNumber
    reservation_id: str
    outputs: dict[int, list[int]]
    began: dict[int, float]
    groups: int = 1


class Release(msgspec.Struct, tag=True, frozen=True):
    """To the decode worker: this reservation is no longer written to; its blocks are free again. If it is
    `doubtful`, because the writer was lost or its transport has failed, bytes may still be in flight: the
    worker has to refuse them."""

    reservation_id: str
    doubtful: bool = False


class Hold(msgspec.Struct, tag=True, frozen=True):
    """Hold back the first token of a request until its transfer reservation arrives."""

    request: str
    attempt: AttemptNumber
