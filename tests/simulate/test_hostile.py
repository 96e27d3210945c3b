"""Transfer reservations that were tampered with in flight are refused, and their prompts are recomputed."""

import pytest

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Send
from streamserve.fleet.worker_state import pairs
from streamserve.protocol.transfers import Push
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import model_info
from tests.simulate.lifecycle import ENGINE, check, submit_requests
from tests.simulate.tampering import TAMPERED, Tamper


class Tampered(Simulation):
    """A fleet whose first five reservations are tampered with in flight to the prefill worker."""

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
    # Each of the two edits of the two streams that are answered early begins an attempt.
    undisturbed = 16 + 2 * 2
    assert attempts == undisturbed if kind == "duplicated" else attempts > undisturbed, (
        "prompts of refused reservations need another attempt"
    )
    report = simulation.workers["decode-0"].engine.report().transfer
    assert report
    assert report.received
