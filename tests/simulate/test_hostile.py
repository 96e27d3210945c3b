"""Transfer reservations that were tampered with in flight: refused, and their prompts computed again."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Send
from streamserve.fleet.worker_state import pairs
from streamserve.protocol.transfers import Push, TransferReservation
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import model_info
from tests.simulate.test_lifecycle_events import ENGINE, check, submit_requests

Tamper = Callable[[TransferReservation], list[TransferReservation]]
"""What arrives instead of a reservation."""

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


class Tampered(Simulation):
    """A fleet where the first five reservations are tampered with in flight to the prefill worker."""

    tamper: Tamper
    left = 5

    def _receive(self, command: Send) -> None:
        if not isinstance(command.message, Push) or not self.left:
            super()._receive(command)
            return
        self.left -= 1
        for reservation in self.tamper(command.message.reservation):
            super()._receive(Send(command.worker, Push(reservation)))


@pytest.mark.parametrize("kind", TAMPERED)
def test_every_text_is_unchanged(kind: str) -> None:
    fleet = FleetConfig(topology=pairs(1), max_attempts=9)
    simulation = Tampered(
        fleet,
        WorkerSpec(ENGINE, model_info(96), lambda tokens, context: 0.01 + tokens * 0.001, wire_seconds=0.004),
    )
    simulation.tamper = TAMPERED[kind]
    expected_texts = submit_requests(simulation, 1)
    check(simulation, expected_texts)
    assert simulation.left == 0
    attempts = next(simulation.fleet.dispatcher._attempts)
    undisturbed = 16 + 2 * 2  # each of the two edits of the two streams answered early begins an attempt
    assert attempts == undisturbed if kind == "duplicated" else attempts > undisturbed, "computed again"
    report = simulation.workers["decode-0"].engine.report().transfer
    assert report
    assert report.received
