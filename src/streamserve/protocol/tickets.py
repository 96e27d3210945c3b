"""Leave to write KV into another worker's cache, and what is said about it.

    decode worker ── Reserved(ticket) ──▶ Fleet ── Push(ticket) ──▶ prefill worker ═══ KV ═══▶ its blocks
                  ◀── Join / Release ────      ◀── Pushed(ticket) ──

A ticket names the request, the attempt and the cache it is for, so a stale or foreign one is refused instead
of turned into tokens from another prompt. Its blocks belong to nobody else until it is closed: by `Join`,
when all its KV has landed, or by `Release`, when its writer is known to write no more.
"""

import msgspec

LAYOUT_VERSION = 1
"""Of [layer][block][k|v][head][slot][dim]; workers that differ in it do not exchange KV."""


class CacheAddress(msgspec.Struct, frozen=True):
    """Where a worker's KV pool lies and what is in it. `path` opens its memory on this host, `size` bytes
    with this `inode`. `fingerprint` covers weights, configuration, KV format, block size and layout
    version. For NIXL: where the memory begins in its process (`base`), and its `agent`'s metadata."""

    path: str
    size: int
    num_blocks: int
    fingerprint: str
    inode: int = 0
    base: int = 0
    agent: bytes = b""


def kv_fingerprint(model: str, block_size: int, draft: str = "") -> str:
    """What two workers must have in common to exchange KV, from the fingerprints of their model and of the
    draft model that has KV beside it, if there is one."""
    return "/".join(filter(None, (model, draft, str(block_size), str(LAYOUT_VERSION))))


class Ticket(msgspec.Struct, frozen=True):
    """Write the KV of `request`'s positions `have` to `tokens` (exclusive) into `blocks` of the pool at `to`,
    the first of which holds position `have`, a multiple of the block size. `choices`: the output choices
    whose sequence this is. `id` is unique among all tickets of a fleet's life."""

    id: str
    request: str
    attempt: int
    choices: tuple[int, ...]
    tokens: int
    have: int
    blocks: list[int]
    to: CacheAddress


class Push(msgspec.Struct, tag=True, frozen=True):
    """To the prefill worker: write to this ticket what is and will be computed of its sequence."""

    ticket: Ticket


class Join(msgspec.Struct, tag=True, frozen=True):
    """To who gave the ticket out: its KV has landed, of the first `planes` planes. Go on behind `outputs` of
    each choice, which had its first token when it `began`; with none, just keep it for who asks next."""

    request: str
    attempt: int
    ticket: str
    outputs: dict[int, list[int]]
    began: dict[int, float]
    planes: int = 1


class Release(msgspec.Struct, tag=True, frozen=True):
    """To the decode worker: nobody will write to this ticket any more; its blocks are free again."""

    ticket: str
