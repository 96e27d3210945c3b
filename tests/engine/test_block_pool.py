"""The block pool: reference counts, LRU reuse, and eviction of a prefix from its end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.engine.block_pool import BlockPool
from streamserve.scheduling.prefix import block_hash, extend_hashes, namespace


def test_a_released_block_is_cached_until_it_is_reallocated() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.register(block, b"a", groups=1)
    pool.release([block])
    assert pool.free == 2
    assert pool.lookup(b"a") == block
    pool.share(block)
    assert pool.free == 1
    pool.release([block])
    assert {pool.allocate(), pool.allocate()} == {0, 1}
    assert pool.lookup(b"a") is None


def test_blocks_without_a_hash_are_reused_first_then_suffixes_before_prefixes() -> None:
    pool = BlockPool(4)
    head, middle, tail, partial = (pool.allocate() for _ in range(4))
    for name, block in ((b"h", head), (b"m", middle), (b"t", tail)):
        pool.register(block, name, groups=1)
    pool.release([head, middle, tail, partial])
    assert [pool.allocate() for _ in range(4)] == [partial, tail, middle, head]


def test_a_block_is_writable_only_with_one_reference_and_unregistered() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    assert pool.writable(block)
    pool.share(block)
    assert not pool.writable(block)
    pool.release([block])
    assert pool.writable(block)
    pool.register(block, b"a", groups=1)
    assert not pool.writable(block)


def test_kv_cache_groups_are_registered_separately() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, b"a", groups=0b01)
    assert pool.has_group(first, 0)
    assert not pool.has_group(first, 1)
    pool.register(first, b"a", groups=0b10)
    assert pool.has_group(first, 1)
    pool.register(second, b"a", groups=0b11)
    assert pool.lookup(b"a") == first, "the registered block stays"
    assert pool.writable(second)


def test_a_withheld_block_is_allocated_only_after_it_was_given_back() -> None:
    pool = BlockPool(2)
    unused, found = pool.allocate(), pool.allocate()
    pool.register(found, b"a", groups=1)
    for block in (unused, found):
        pool.withhold(block)
        pool.release([block])
    assert pool.free == 0
    assert pool.lookup(b"a") == found
    pool.share(found)
    pool.give_back()
    assert pool.free == 1
    assert pool.allocate() == unused
    pool.release([found])
    assert pool.free == 1


def test_misuse_raises_errors() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    with pytest.raises(RuntimeError, match="no free"):
        pool.allocate()
    pool.release([block])
    with pytest.raises(RuntimeError, match="more often"):
        pool.release([block])


@given(st.lists(st.integers(0, 99)))
def test_no_block_is_lost_or_held_twice(choices: list[int]) -> None:
    pool = BlockPool(8)
    held: list[int] = []
    for choice in choices:
        if choice % 3 == 0 and held:
            pool.release([held.pop(choice % len(held))])
        elif choice % 3 == 1 and held:
            pool.share(held[choice % len(held)])
            held.append(held[choice % len(held)])
        elif pool.free:
            block = pool.allocate()
            assert block not in held
            held.append(block)
        assert pool.free == 8 - len(set(held))


def test_a_hash_covers_all_tokens_before_and_in_a_block() -> None:
    tokens = list(range(12))
    root = namespace("model", "")
    hashes: list[bytes] = []
    extend_hashes(hashes, root, tokens, 4, 11)
    assert len(hashes) == 2
    assert hashes[1] == block_hash(block_hash(root, [0, 1, 2, 3]), [4, 5, 6, 7])
    assert namespace("model", "a") != namespace("modela", "")
    assert block_hash(root, [1, 2]) != block_hash(root, [2, 1])
    assert hashes[0].hex() == "2850a1ac3c1f1a8abceb7085c7f9e57b", "the same in every process and release"
