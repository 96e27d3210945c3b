"""An engine that leaves its fleet for another one retains nothing of its requests but the KV of prefixes."""

import mmap

from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.engine_config import EngineConfig
from streamserve.engine.engine import Engine
from streamserve.engine.invariants import check_state
from streamserve.engine.ports import EnginePorts
from streamserve.protocol.journal import JOURNAL_BYTES, read_journal
from streamserve.protocol.messages import Cached, Reserved
from streamserve.protocol.sampling import SamplingParams
from streamserve.protocol.transfers import CacheAddress
from streamserve.simulate.executor import CostExecutor
from streamserve.simulate.transport import SimulatedTransport
from streamserve.speculation.controller import Speculation, default_cost
from streamserve.transfer.gate import BlockGate
from streamserve.workers.journal import StepJournal
from tests.engine.drive import VOCAB, assert_engine_empty, model_info, submit
from tests.engine.prefill import GOOD, run_prefill

CONFIG = EngineConfig(num_blocks=32, block_size=4, max_model_len=64)
PROMPT = list(range(20))
ADDRESS = CacheAddress("decode", 0, 32, "fake")


def engine_with(ports: EnginePorts) -> Engine:
    executor = CostExecutor(CONFIG.num_blocks, 4, VOCAB, lambda rows, context: 1.0)
    speculation = Speculation(parse_policy("off"), default_cost)
    return Engine(CONFIG, model_info(64), executor, lambda: 0.0, None, speculation, ports)


def greedy(max_tokens: int = 9) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens)


def test_the_prefix_cache_stays_and_is_reported_as_a_whole() -> None:
    engine = engine_with(EnginePorts(reports_prefixes=True))
    engine.handle(submit("r", PROMPT, greedy()))
    for _ in range(3):
        engine.step()
    first = engine.take_cache_updates()
    assert isinstance(first, Cached)
    engine.leave()
    assert_engine_empty(engine)
    assert engine.take_cache_updates() is None
    engine.attach(None, None, "unified-3/1")
    again = engine.take_cache_updates()
    assert isinstance(again, Cached)
    assert set(again.stored) == set(first.stored)
    assert not again.dropped
    before = engine.report().prefix_hits
    engine.handle(submit("r", PROMPT, greedy()))
    while engine.has_work:
        engine.step()
    assert engine.report().prefix_hits - before >= 16


def test_reserved_blocks_stay_closed_until_their_writers_are_certain_not_to_write() -> None:
    gate = BlockGate()
    engine = engine_with(EnginePorts("decode-0/1", cache=ADDRESS, gate=gate))
    engine.handle(submit("r", PROMPT, greedy(), phase="decode"))
    engine.step()
    (reserved,) = engine.transfers.take_updates()
    assert isinstance(reserved, Reserved)
    blocks = reserved.reservation.blocks
    assert gate.write(reserved.reservation.id, blocks, lambda: None) == ""
    engine.leave()
    assert "closed" in gate.write(reserved.reservation.id, blocks, lambda: None)
    pool = engine.scheduler.tables.pool
    assert not any(pool.is_free(block) for block in blocks)
    engine.attach(None, CacheAddress("other", 0, 32, "fake"), "decode-1/1")
    check_state(engine.scheduler, engine.transfers)
    engine.handle(submit("r", PROMPT, greedy(), phase="decode"))
    engine.step()
    (next_one,) = engine.transfers.take_updates()
    assert isinstance(next_one, Reserved)
    assert next_one.reservation.id != reserved.reservation.id
    assert next_one.reservation.to.path == "other"
    assert not set(next_one.reservation.blocks) & set(blocks)
    engine.transfers.release_abandoned()
    assert all(pool.is_free(block) for block in blocks)
    check_state(engine.scheduler, engine.transfers)


def test_blocks_that_were_being_sent_are_free_at_once() -> None:
    """Blocks that were being sent are free at once, since the closed transport reads no blocks."""
    engine, _, _ = run_prefill(GOOD, wire=[])
    assert engine.transfers.held_blocks()
    engine.leave()
    assert not engine.transfers.held_blocks()
    assert_engine_empty(engine)
    other = SimulatedTransport(engine.executor, lambda path: None, lambda seconds, land: None, 0.0)  # type: ignore[arg-type]
    engine.attach(other, None, "prefill-0/1")
    assert not engine.transfers.take_updates()


def test_the_journal_names_no_request_of_the_fleet_before() -> None:
    """The journal names no request of the previous fleet; otherwise the next fleet's request with the same
    number would be blamed for the worker's death."""
    memory = mmap.mmap(-1, JOURNAL_BYTES)
    journal = StepJournal(memory)
    engine = engine_with(EnginePorts(journal=journal))
    engine.handle(submit("r", PROMPT, greedy()))
    journal.leave(list(engine.scheduler.sequences.values()))  # a cached copy of it is being sent
    assert read_journal(memory).attempts
    engine.leave()
    assert (read_journal(memory).attempts, read_journal(memory).phase) == (frozenset(), "")
