"""The KV transfer manager: what becomes of sequences whose transfer reservation is deferred."""

from streamserve.contracts.engine_config import EngineConfig
from streamserve.engine.sequence import EngineSequence
from streamserve.engine.status import TransferRole
from streamserve.engine.validation import make_sequence
from streamserve.protocol.messages import Deferred
from streamserve.protocol.sampling import SamplingParams
from tests.engine.drive import make_engine, submit


def receiver() -> EngineSequence:
    """Return a waiting sequence that receives its KV, and that an earlier step passed over."""
    message = submit("r", [1, 2], SamplingParams(), phase="decode")
    sequence = make_sequence(message, (0,), id=1, root=b"", groups=1, survival=1.0)
    assert sequence.transfer.role is TransferRole.RECEIVER
    sequence.passed_over = True
    return sequence


def test_a_deferred_sequence_is_reported_once() -> None:
    transfers, sequence = make_engine(EngineConfig(num_blocks=8)).transfers, receiver()
    transfers.defer([sequence])
    transfers.defer([sequence])
    assert transfers.take_updates() == [Deferred("r", sequence.attempt)]


def test_a_deferred_sequence_is_left_no_memory() -> None:
    """Swapped sequences wait while the free blocks are needed by a higher-ranked one that was passed over."""
    sequence = receiver()
    make_engine(EngineConfig(num_blocks=8)).transfers.defer([sequence])
    assert not sequence.passed_over
