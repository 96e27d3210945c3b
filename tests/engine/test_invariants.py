"""Each violation of an invariant is reported."""

from collections.abc import Callable

import pytest

from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import DRAFT, TARGET
from streamserve.engine.engine import Engine
from streamserve.engine.invariants import InvariantError, check_state
from streamserve.engine.sequence import EngineSequence, Transfer
from streamserve.engine.status import SequenceStatus, TransferRole
from streamserve.protocol.sampling import SamplingParams
from tests.engine.drive import assert_engine_empty, make_engine, submit

CONFIG = EngineConfig(
    num_blocks=24, block_size=4, max_model_len=96, max_num_batched_tokens=32, swap_blocks=8, check=True
)


@pytest.fixture
def engine() -> Engine:
    """An engine with a draft model that decodes two requests with a shared prefix."""
    engine = make_engine(CONFIG, draft_model=0.7)
    engine.handle(submit("a", list(range(20)), SamplingParams(seed=1, max_tokens=40)))
    while not any(sequence.outputs for sequence in engine.scheduler.sequences.values()):
        engine.step()
    engine.handle(submit("b", list(range(20)), SamplingParams(seed=2, max_tokens=40)))
    for _ in range(3):
        engine.step()
    assert len([s for s in engine.scheduler.sequences.values() if s.decoding]) == 2
    return engine


def test_a_healthy_engine_passes(engine: Engine) -> None:
    check_state(engine.scheduler, engine.transfers)
    while engine.has_work:
        engine.step()
    check_state(engine.scheduler, engine.transfers)
    assert_engine_empty(engine)


def _first(engine: Engine) -> EngineSequence:
    return next(iter(engine.scheduler.sequences.values()))


def _grow_draft(engine: Engine) -> None:
    _first(engine).kv.computed[DRAFT] += 40


def _grow_target(engine: Engine) -> None:
    _first(engine).kv.computed[TARGET] = len(_first(engine).kv.blocks) * CONFIG.block_size + 1


def _leak_block(engine: Engine) -> None:
    engine.scheduler.tables.pool.allocate()


def _free_held(engine: Engine) -> None:
    engine.scheduler.tables.pool.release(_first(engine).kv.blocks[-1:])


def _drop_from_table(engine: Engine) -> None:
    _first(engine).kv.blocks.pop()


def _lose_host_block(engine: Engine) -> None:
    engine.scheduler.swap._free.pop()


def _rename(engine: Engine) -> None:
    pool = engine.scheduler.tables.pool
    pool._hashes[_first(engine).kv.blocks[0]] = b"another"


def _await_kv(engine: Engine) -> None:
    _first(engine).status = SequenceStatus.AWAITING_KV


def _send(engine: Engine) -> None:
    _first(engine).status = SequenceStatus.SENDING


def _swap(engine: Engine) -> None:
    _first(engine).status = SequenceStatus.SWAPPED


def _receive(engine: Engine) -> None:
    _first(engine).transfer.role = TransferRole.RECEIVER


def _grant(engine: Engine) -> None:
    _first(engine).transfer.has_reservation = True


def _await_the_reservation_held(engine: Engine) -> None:
    sequence = _first(engine)
    engine.scheduler.tables.drop(sequence)
    sequence.status = SequenceStatus.AWAITING_RESERVATION
    sequence.transfer = Transfer(TransferRole.SENDER, has_reservation=True)


def _double(engine: Engine) -> None:
    first, second = engine.scheduler.sequences.values()
    second.submitted = first.submitted


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (_grow_draft, "tokens are computed, but there are"),
        (_grow_target, "tokens are computed"),
        (_leak_block, "other references than holders"),
        (_free_held, "other references than holders"),
        (_drop_from_table, "other references than holders"),
        (_lose_host_block, "host blocks"),
        (_rename, "names lead to other blocks"),
        (_await_kv, "is awaiting KV, but its role is local"),
        (_send, "is sending, but its role is local"),
        (_swap, "is swapped with 9 blocks"),
        (_receive, "is running, but its KV has not landed"),
        (_grant, "holds a transfer reservation, but its role is local"),
        (_await_the_reservation_held, "awaits the transfer reservation that it holds"),
        (_double, "computed by 2 sequences"),
    ],
)
def test_a_violated_invariant_is_named(
    engine: Engine, corrupt: Callable[[Engine], None], message: str
) -> None:
    corrupt(engine)
    with pytest.raises(InvariantError, match=message):
        check_state(engine.scheduler, engine.transfers)


def test_a_plan_that_writes_to_a_shared_block_is_refused(engine: Engine) -> None:
    sequence = _first(engine)
    engine.scheduler.tables.pool.share(sequence.kv.blocks[-1])
    engine.scheduler.tables._copy_needed = lambda sequence: False  # type: ignore[method-assign]
    with pytest.raises(InvariantError, match="is not its sequence's alone"):
        engine.step()
