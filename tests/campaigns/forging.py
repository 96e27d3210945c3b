"""Forged messages of the worker protocol: bytes, fields and whole messages that are not what they should be.

None of them can be taken for a true one: they name requests that do not exist, or other attempts.
"""

from random import Random
from typing import Any

import msgspec

from streamserve.protocol.messages import (
    Admitted,
    Cached,
    Cancel,
    Edit,
    Events,
    Finished,
    Progress,
    PromptLogprobs,
    Pushed,
    Reserved,
    Token,
    Transfers,
    Withdrawn,
    encode,
)
from streamserve.protocol.tickets import CacheAddress, Join, Push, Release, TransferReservation
from tests.campaigns.mutate import PACKABLE, changed, disturbed_bytes

LARGE = (-1, 0, 1, 7, 2**31, 2**62)
GHOST = "ghost"
"""How the names of requests begin that nobody asked for."""


def to_worker(rng: Random, genuine: bytes, unreadable: bool = True) -> list[bytes]:
    """Return forged messages for a worker that was just sent `genuine`. Ghosts that begin are cancelled."""
    match rng.randrange(5):
        case 0:
            return [_unreadable(rng, genuine)] if unreadable else []
        case 1:
            return [encode(_wrong_order(rng, _known(genuine)))]
        case _:
            ghost = f"{GHOST}-{rng.getrandbits(40)}"
            return [*_disfigured(rng, genuine, ghost), encode(Cancel(ghost))]


def to_fleet(rng: Random, genuine: bytes) -> list[bytes]:
    """Return forged messages as from the worker that just sent `genuine`; all can be read."""
    request, attempt = _known(genuine)
    wrong = rng.choice((attempt + 1000, -1, 2**60))
    name = rng.choice((request or "none", f"{GHOST}-1", "\0return/x", ""))
    number = rng.choice(LARGE)
    events = [
        Token(name, wrong, number, rng.choice(LARGE), number, finish=rng.choice((None, "stop", "error"))),
        Finished(name, wrong, number, "error", "forged", 500),
        Admitted(name, wrong, number, number, float("nan")),
        Progress(name, wrong, number, number, number),
        Withdrawn(name, wrong, number),
        PromptLogprobs(name, wrong, number, []),
    ]
    ticket = _ticket(rng, f"{GHOST}-2", wrong)
    forged = [
        Events(rng.choices(events, k=rng.choice((1, 3, 100)))),
        Events([]),
        Transfers([Reserved(f"{GHOST}-2", wrong, ticket), Pushed(name, wrong, f"{GHOST}-ticket", "forged")]),
        Cached([rng.randbytes(rng.choice((0, 16, 100)))] * 50, [rng.randbytes(16)] * 50),
    ]
    return [encode(rng.choice(forged))]


def unreadable_to_fleet(rng: Random, genuine: bytes) -> bytes:
    """Return what the fleet cannot read."""
    return _unreadable(rng, genuine)


def _unreadable(rng: Random, genuine: bytes) -> bytes:
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.choice((0, 1, 10, 5000)))
        case 1:
            return genuine[: rng.randrange(len(genuine))]
        case 2:
            return msgspec.msgpack.encode({"type": "Nothing", "request": [[]] * 100})
        case _:
            return b"\xc1" + disturbed_bytes(rng, genuine)  # a byte that msgpack never uses


def _disfigured(rng: Random, genuine: bytes, ghost: str) -> list[bytes]:
    """A genuine message of another request, with some of its fields changed."""
    fields = msgspec.msgpack.decode(genuine, strict=False)
    if not isinstance(fields, dict) or "request" not in fields or fields.get("type") == "Cancel":
        return []
    fields = changed(rng, fields, PACKABLE)
    if not isinstance(fields, dict):
        return []
    fields["request"] = ghost
    return [msgspec.msgpack.encode(_packable(fields))]


def _packable(part: Any) -> Any:
    """The same without texts that UTF-8 has not."""
    if isinstance(part, dict):
        return {_packable(key): _packable(value) for key, value in part.items()}
    if isinstance(part, list):
        return [_packable(value) for value in part]
    return part.encode("utf-8", "replace").decode() if isinstance(part, str) else part


def _wrong_order(rng: Random, known: tuple[str, int]) -> Edit | Cancel | Push | Join | Release:
    request, attempt = known
    number = rng.choice(LARGE)
    name = rng.choice((request or "none", f"{GHOST}-3"))
    wrong = attempt + 1000
    return rng.choice(
        [
            Edit(name, wrong, number, number, [rng.choice(LARGE)] * 5, rng.random() < 0.5),
            Cancel(f"{GHOST}-4", number),
            Push(_ticket(rng, name, wrong)),
            Join(name, wrong, f"{GHOST}-ticket", {0: [5], number: []}, {0: 0.0}, number),
            Release(f"{GHOST}-ticket"),
        ]
    )


def _ticket(rng: Random, name: str, attempt: int) -> TransferReservation:
    number = rng.choice(LARGE)
    path = rng.choice(("", "/dev/null", "/proc/self/mem", "/nothing"))
    to = CacheAddress(path, number, number, rng.choice(("", "model/16/1")), number)
    blocks = [rng.choice(LARGE)] * rng.choice((0, 1, 1000))
    return TransferReservation(
        f"{GHOST}-ticket", name, attempt, (0, 1), number, rng.choice(LARGE), blocks, to
    )


def _known(genuine: bytes) -> tuple[str, int]:
    """The request and the attempt that a message names, if it does."""
    fields = msgspec.msgpack.decode(genuine, strict=False)
    fields = fields if isinstance(fields, dict) else {}
    if fields.get("events"):
        _, request, attempt, *_ = fields["events"][0]
        return request, attempt
    return fields.get("request", ""), fields.get("attempt", 0)
