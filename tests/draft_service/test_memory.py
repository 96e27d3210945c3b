"""Blocks of a draft service are allocated and released correctly."""

import pytest

from streamserve.draft_service.server.memory import FreeList


def test_blocks_are_allocated_once_and_the_latest_released_first() -> None:
    blocks = FreeList(4)
    assert [blocks.allocate() for _ in range(3)] == [0, 1, 2]
    blocks.release([0, 2])
    assert blocks.free == 3
    assert [blocks.allocate() for _ in range(3)] == [0, 2, 3]
    with pytest.raises(RuntimeError, match="no free KV block"):
        blocks.allocate()


def test_a_free_block_cannot_be_released() -> None:
    blocks = FreeList(2)
    with pytest.raises(RuntimeError, match="released more often than taken"):
        blocks.release([1])
