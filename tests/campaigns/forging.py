"""Forged messages of the worker protocol: invalid bytes, fields and messages.

None of them is valid for a real request: they name requests that do not exist, or other attempts.
"""

from random import Random
from typing import Any

import msgspec

from streamserve.protocol.messages import (
    AdapterLoaded,
    Admitted,
    Cached,
    Cancel,
    Edit,
    Events,
    Finished,
    LoadAdapter,
    OutputWithdrawn,
    Progress,
    PromptLogprobs,
    Pushed,
    Reserved,
    ToEngine,
    Token,
    Transfers,
    UnloadAdapter,
    encode,
)
from streamserve.protocol.transfers import CacheAddress, Join, Push, Release, TransferReservation
from tests.campaigns.mutate import PACKABLE, mutated, mutated_bytes

LARGE = (-1, 0, 1, 7, 2**31, 2**62)
UNKNOWN = "unknown"
"""Prefix of the ids of forged requests."""


def to_worker(rng: Random, original: bytes, unreadable: bool = True) -> list[bytes]:
    """Return forged messages for a worker that was just sent `original`. Forged requests are cancelled."""
    match rng.randrange(5):
        case 0:
            return [_unreadable(rng, original)] if unreadable else []
        case 1:
            return [encode(_wrong_command(rng, _request_and_attempt(original)))]
        case _:
            unknown = f"{UNKNOWN}-{rng.getrandbits(40)}"
            return [*_mutated_message(rng, original, unknown), encode(Cancel(unknown))]


def to_fleet(rng: Random, original: bytes) -> list[bytes]:
    """Return forged messages as from the worker that just sent `original`; all can be read."""
    request, attempt = _request_and_attempt(original)
    wrong = rng.choice((attempt + 1000, -1, 2**60))
    name = rng.choice((request or "none", f"{UNKNOWN}-1", "\0return/x", ""))
    number = rng.choice(LARGE)
    events = [
        Token(name, wrong, number, rng.choice(LARGE), number, finish=rng.choice((None, "stop", "error"))),
        Finished(name, wrong, number, "error", "forged", 500),
        Admitted(name, wrong, number, number, float("nan")),
        Progress(name, wrong, number, number, number),
        OutputWithdrawn(name, wrong, number),
        PromptLogprobs(name, wrong, number, []),
    ]
    reservation = _reservation(rng, f"{UNKNOWN}-2", wrong)
    forged = [
        Events(rng.choices(events, k=rng.choice((1, 3, 100)))),
        Events([]),
        Transfers(
            [
                Reserved(f"{UNKNOWN}-2", wrong, reservation),
                Pushed(name, wrong, f"{UNKNOWN}-reservation", "forged"),
            ]
        ),
        AdapterLoaded(f"{UNKNOWN}-adapter", rng.choice(("", "forged"))),
        Cached([rng.randbytes(rng.choice((0, 16, 100)))] * 50, [rng.randbytes(16)] * 50),
    ]
    return [encode(rng.choice(forged))]


def unreadable_to_fleet(rng: Random, original: bytes) -> bytes:
    """Return a message that the fleet cannot decode."""
    return _unreadable(rng, original)


def _unreadable(rng: Random, original: bytes) -> bytes:
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.choice((0, 1, 10, 5000)))
        case 1:
            return original[: rng.randrange(len(original))]
        case 2:
            return msgspec.msgpack.encode({"type": "Nothing", "request": [[]] * 100})
        case _:
            return b"\xc1" + mutated_bytes(rng, original)  # a byte that msgpack never uses


def _mutated_message(rng: Random, original: bytes, unknown: str) -> list[bytes]:
    """Return the message for the request `unknown`, with some of its fields changed."""
    fields = msgspec.msgpack.decode(original, strict=False)
    if not isinstance(fields, dict) or "request" not in fields or fields.get("type") == "Cancel":
        return []
    fields = mutated(rng, fields, PACKABLE)
    if not isinstance(fields, dict):
        return []
    fields["request"] = unknown
    return [msgspec.msgpack.encode(_encodable(fields))]


def _encodable(part: Any) -> Any:
    """Return the data without strings that UTF-8 cannot encode."""
    if isinstance(part, dict):
        return {_encodable(key): _encodable(value) for key, value in part.items()}
    if isinstance(part, list):
        return [_encodable(value) for value in part]
    return part.encode("utf-8", "replace").decode() if isinstance(part, str) else part


def _wrong_command(rng: Random, named: tuple[str, int]) -> ToEngine:
    request, attempt = named
    number = rng.choice(LARGE)
    name = rng.choice((request or "none", f"{UNKNOWN}-3"))
    wrong = attempt + 1000
    return rng.choice(
        [
            Edit(name, wrong, number, number, [rng.choice(LARGE)] * 5, rng.random() < 0.5),
            Cancel(f"{UNKNOWN}-4", number),
            Push(_reservation(rng, name, wrong)),
            Join(name, wrong, f"{UNKNOWN}-reservation", {0: [5], number: []}, {0: 0.0}, number),
            Release(f"{UNKNOWN}-reservation"),
            LoadAdapter(f"{UNKNOWN}-adapter", rng.choice(("", "/nothing", "/dev", "\0", "a" * 5000))),
            UnloadAdapter(f"{UNKNOWN}-adapter"),
        ]
    )


def _reservation(rng: Random, name: str, attempt: int) -> TransferReservation:
    number = rng.choice(LARGE)
    path = rng.choice(("", "/dev/null", "/proc/self/mem", "/nothing"))
    to = CacheAddress(path, number, number, rng.choice(("", "model/16/1")), number)
    blocks = [rng.choice(LARGE)] * rng.choice((0, 1, 1000))
    return TransferReservation(
        f"{UNKNOWN}-reservation", name, attempt, (0, 1), number, rng.choice(LARGE), blocks, to
    )


def _request_and_attempt(original: bytes) -> tuple[str, int]:
    """Return the request and the attempt that a message names, if any."""
    fields = msgspec.msgpack.decode(original, strict=False)
    fields = fields if isinstance(fields, dict) else {}
    if fields.get("events"):
        _, request, attempt, *_ = fields["events"][0]
        return request, attempt
    return fields.get("request", ""), fields.get("attempt", 0)
