"""Transfer reservations with the changes that a hostile worker may make."""

from collections.abc import Callable

from msgspec.structs import replace

from streamserve.protocol.transfers import TransferReservation

Tamper = Callable[[TransferReservation], list[TransferReservation]]
"""A function that returns the messages that arrive in place of a reservation."""

TAMPERED: dict[str, Tamper] = {
    "forged": lambda reservation: [replace(reservation, id="forged")],
    "forged and genuine": lambda reservation: [
        reservation,
        replace(reservation, id="forged", blocks=reservation.blocks[::-1]),
    ],
    "of another": lambda reservation: [replace(reservation, request="unknown")],
    "stale": lambda reservation: [replace(reservation, attempt=reservation.attempt - 1)],
    "duplicated": lambda reservation: [reservation, reservation],
    "truncated": lambda reservation: [replace(reservation, blocks=reservation.blocks[:-1])],
    "shortened": lambda reservation: [replace(reservation, tokens=reservation.tokens - 1)],
    "outside": lambda reservation: [replace(reservation, blocks=[10**6, *reservation.blocks[1:]])],
    "elsewhere": lambda reservation: [replace(reservation, to=replace(reservation.to, path="decode-0/9"))],
}
