"""A stream pair's transfer reservations, made by a test."""

from streamserve.fleet.events import Open
from streamserve.protocol.sampling import SamplingParams
from streamserve.protocol.transfers import CacheAddress, TransferReservation

P, D = "prefill-0", "decode-0"
OPEN = Open("r", [1, 2, 3], SamplingParams(seed=1, max_tokens=9))
CACHE = CacheAddress("here", 1, 9, "fake/4/1")


def reservation(attempt: int, request: str = "r", id: str = "decode-0/1/0") -> TransferReservation:
    return TransferReservation(id, request, attempt, (0,), 3, 0, [5], CACHE)
