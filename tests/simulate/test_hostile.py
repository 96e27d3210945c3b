"""Tickets that were tampered with on their way: refused, and what they were for is computed again."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Send
from streamserve.fleet.worker_state import pairs
from streamserve.protocol.tickets import Push, TransferReservation
from streamserve.simulate.simulation import Simulation
from tests.engine.drive import model_info
from tests.simulate.test_moments import ENGINE, ask, check

Tamper = Callable[[TransferReservation], list[TransferReservation]]
"""What arrives instead of a ticket."""

TAMPERED: dict[str, Tamper] = {
    "forged": lambda ticket: [replace(ticket, id="forged")],
    "forged beside": lambda ticket: [ticket, replace(ticket, id="forged", blocks=ticket.blocks[::-1])],
    "of another": lambda ticket: [replace(ticket, request="nobody")],
    "stale": lambda ticket: [replace(ticket, attempt=ticket.attempt - 1)],
    "duplicated": lambda ticket: [ticket, ticket],
    "truncated": lambda ticket: [replace(ticket, blocks=ticket.blocks[:-1])],
    "shortened": lambda ticket: [replace(ticket, tokens=ticket.tokens - 1)],
    "outside": lambda ticket: [replace(ticket, blocks=[10**6, *ticket.blocks[1:]])],
    "elsewhere": lambda ticket: [replace(ticket, to=replace(ticket.to, path="decode-0/9"))],
}


class Tampered(Simulation):
    """The first five tickets are tampered with on their way to the prefill worker."""

    tamper: Tamper
    left = 5

    def _receive(self, command: Send) -> None:
        if not isinstance(command.message, Push) or not self.left:
            super()._receive(command)
            return
        self.left -= 1
        for ticket in self.tamper(command.message.ticket):
            super()._receive(Send(command.worker, Push(ticket)))


@pytest.mark.parametrize("kind", TAMPERED)
def test_every_answer_is_what_it_would_have_been(kind: str) -> None:
    fleet = FleetConfig(topology=pairs(1), max_attempts=9)
    simulation = Tampered(
        fleet, ENGINE, model_info(96), lambda rows, context: 0.01 + rows * 0.001, wire_seconds=0.004
    )
    simulation.tamper = TAMPERED[kind]
    answers = ask(simulation, 1)
    check(simulation, answers)
    assert simulation.left == 0
    attempts = next(simulation.fleet._attempts)
    assert attempts == 16 if kind == "duplicated" else attempts > 16, "what was refused was tried again"
    report = simulation.workers["decode-0"].engine.report().transfer
    assert report
    assert report.received
