"""Memory of the KV cache is taken ahead, and nothing that stands in it changes."""

import re
import threading
from pathlib import Path

import pytest
import torch

from streamserve.execution.native.library import Team, kernels
from streamserve.execution.populate import PIECE, Populating, pieces


def resident_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_pieces_cover_a_pool_once_the_first_blocks_first() -> None:
    pool = torch.empty(3, PIECE + 1000, dtype=torch.uint8)
    found = list(pieces(pool))
    assert sorted(found[:3]) == [(pool[layer].data_ptr(), PIECE) for layer in range(3)]
    assert sorted(found[3:]) == [(pool[layer].data_ptr() + PIECE, 1000) for layer in range(3)]


def test_a_pool_is_taken_and_what_is_written_meanwhile_stays() -> None:
    library = kernels()
    if library is None:
        pytest.skip("no kernels on this machine")
    pool = torch.empty(4, 16 << 20, dtype=torch.uint8)
    before = resident_bytes()
    populating = Populating([pool], Team(library, 1).populate)
    pool[1, ::4096] = 7
    populating.join()
    assert resident_bytes() - before > 0.9 * pool.nbytes
    assert bool((pool[1, ::4096] == 7).all())


def test_it_ends_when_it_is_closed_or_the_system_cannot() -> None:
    pool = torch.empty(2, 8 * PIECE, dtype=torch.uint8)
    asked: list[int] = []
    going = threading.Event()

    def slowly(begin: int, size: int) -> bool:
        asked.append(begin)
        return going.wait(0.05) or True

    closed = Populating([pool], slowly)
    closed.close()
    assert len(asked) < 16
    asked.clear()

    def cannot(begin: int, size: int) -> bool:
        asked.append(begin)
        return False

    Populating([pool], cannot).join()
    assert len(asked) == 1
