"""A block has the right owners while it is copied."""

import pytest

from streamserve.contracts.plan import TARGET
from streamserve.engine.block_tables import BlockTables
from streamserve.engine.sequence import EngineSequence, KVState
from streamserve.protocol.messages import Submit
from streamserve.protocol.sampling import SamplingParams

SIZE = 4


def sequence(tables: BlockTables, tokens: int) -> EngineSequence:
    """Return a sequence whose tokens are computed."""
    submitted = Submit("r", list(range(tokens)), SamplingParams(), outputs={0: []})
    new = EngineSequence(
        1, submitted, (0,), submitted.params, tokens, list(submitted.prompt), KVState(b"root", [0])
    )
    tables.grow(new, tokens)
    new.kv.computed[TARGET] = tokens
    return new


def test_the_source_of_a_copy_is_no_others_until_the_step_is_fixed() -> None:
    """The source of a copy is not given to another sequence until the step is fixed: a drafter that shares
    the target's KV writes while the step is planned, before the copies run."""
    tables = BlockTables(3, SIZE, groups=1, prefix_caching=True)
    edited = sequence(tables, 2 * SIZE)
    tables.register(edited)
    source = edited.kv.blocks[1]
    edited.kv.computed[TARGET] = SIZE + 1
    del edited.kv.hashes[1:]
    tables.grow(edited, 1)
    assert edited.kv.blocks[1] != source
    assert tables.pool.free == 0
    with pytest.raises(RuntimeError, match="no free KV block"):
        tables.pool.allocate()
    assert tables.take_copies() == [(source, edited.kv.blocks[1])]
    assert tables.pool.allocate() == source


def test_a_shared_source_of_a_copy_is_no_others_when_its_sharer_is_evicted() -> None:
    """A shared source block stays reserved when its sharer is evicted: the first of two forks copies the
    block, and the second, which still holds it, leaves in the same plan."""
    tables = BlockTables(3, SIZE, groups=1, prefix_caching=True)
    first = sequence(tables, SIZE + 1)
    second = sequence(tables, 0)
    tables.fork(first, second)
    source = first.kv.blocks[1]
    tables.grow(first, 1)
    assert first.kv.blocks[1] != source
    tables.drop(second)
    assert tables.pool.free == 0
    assert tables.take_copies() == [(source, first.kv.blocks[1])]
    assert tables.pool.allocate() == source
