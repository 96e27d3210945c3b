"""KV written into another process's pool: exactly the blocks that were meant, and refusals of all others."""

import gc
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from streamserve.engine.transfer import Landed, TransferError
from streamserve.protocol.tickets import CacheAddress
from streamserve.transfer.shared_memory import SharedMemory, SharedMemoryTransport

LAYERS, BLOCKS, WIDTH = 3, 8, 32
FINGERPRINT = "model/16/1"


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.randint(0, 256, (LAYERS, 5, WIDTH), dtype=torch.uint8)


@pytest.fixture
def transport(pool: torch.Tensor) -> Iterator[SharedMemoryTransport]:
    transport = SharedMemoryTransport(pool, FINGERPRINT)
    yield transport
    transport.close()


def receiving() -> tuple[torch.Tensor, CacheAddress]:
    memory = SharedMemory()
    pool = memory.allocate(LAYERS * BLOCKS * WIDTH).view(LAYERS, BLOCKS, WIDTH)
    return pool, memory.address(BLOCKS, FINGERPRINT)


def wait(transport: SharedMemoryTransport, jobs: int) -> list[Landed]:
    landed: list[Landed] = []
    deadline = time.monotonic() + 20
    while len(landed) < jobs:
        landed += transport.landed()
        assert time.monotonic() < deadline
    return landed


def test_blocks_land_where_they_were_sent(transport: SharedMemoryTransport, pool: torch.Tensor) -> None:
    target, address = receiving()
    transport.check(address)
    jobs = [transport.push(address, [(0, 7), (4, 2)]), transport.push(address, [(1, 3)])]
    landed = wait(transport, 2)
    assert [(one.job, one.sent, one.error) for one in landed] == [
        (jobs[0], 2 * LAYERS * WIDTH, ""),
        (jobs[1], LAYERS * WIDTH, ""),
    ]
    for own, there in ((0, 7), (4, 2), (1, 3)):
        assert torch.equal(target[:, there], pool[:, own])
    untouched = [0, 1, 4, 5, 6]
    assert not target[:, untouched].any()


def test_the_receiver_may_be_another_process(transport: SharedMemoryTransport, pool: torch.Tensor) -> None:
    code = f"""
import sys
from streamserve.transfer.shared_memory import SharedMemory
memory = SharedMemory()
pool = memory.allocate({LAYERS * BLOCKS * WIDTH}).view({LAYERS}, {BLOCKS}, {WIDTH})
address = memory.address({BLOCKS}, "{FINGERPRINT}")
print(address.path, address.inode, flush=True)
sys.stdin.readline()
print(pool[:, 6].flatten().tolist(), flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        path, inode = other.stdout.readline().split()
        address = CacheAddress(path, LAYERS * BLOCKS * WIDTH, BLOCKS, FINGERPRINT, int(inode))
        transport.check(address)
        transport.push(address, [(2, 6)])
        assert wait(transport, 1)[0].sent > 0
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline().strip() == str(pool[:, 2].flatten().tolist())
    with pytest.raises(TransferError, match="cannot be opened"):
        SharedMemoryTransport(pool, FINGERPRINT).check(address)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fingerprint": "other/16/1"}, "does not fit"),
        ({"size": 5}, "is not 8 blocks"),
        ({"num_blocks": 9}, "is not 9 blocks"),
        ({"inode": 1}, "another's memory"),
        ({"path": "/proc/self/fd/999"}, "cannot be opened"),
    ],
)
def test_a_forged_or_stale_address_is_refused(
    transport: SharedMemoryTransport, changed: dict[str, object], message: str
) -> None:
    target, address = receiving()
    with pytest.raises(TransferError, match=message):
        transport.check(msgspec.structs.replace(address, **changed))
    assert not target.any()


def test_blocks_that_are_not_there_are_an_error(transport: SharedMemoryTransport) -> None:
    _, address = receiving()
    transport.check(address)
    transport.push(address, [(0, BLOCKS)])
    (landed,) = wait(transport, 1)
    assert landed.error
    assert landed.sent == 0


def test_a_paced_wire_takes_its_time(pool: torch.Tensor) -> None:
    transport = SharedMemoryTransport(pool, FINGERPRINT, bytes_per_second=LAYERS * WIDTH * 10)
    _, address = receiving()
    transport.check(address)
    started = time.monotonic()
    transport.push(address, [(0, 0), (1, 1)])
    wait(transport, 1)
    assert time.monotonic() - started >= 0.2
    transport.close()


def test_nothing_is_left_of_the_dead(transport: SharedMemoryTransport) -> None:
    """Once a pool's process is gone, opening another lets go of its memory."""
    code = f"""
from streamserve.transfer.shared_memory import SharedMemory
memory = SharedMemory()
memory.allocate({LAYERS * BLOCKS * WIDTH})
address = memory.address({BLOCKS}, "{FINGERPRINT}")
print(address.path, address.inode, flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        path, inode = other.stdout.readline().split()
        transport.check(CacheAddress(path, LAYERS * BLOCKS * WIDTH, BLOCKS, FINGERPRINT, int(inode)))
        other.kill()
    _, address = receiving()
    transport.check(address)
    gc.collect()
    with open("/proc/self/maps") as maps:
        mine = [line for line in maps if "streamserve-kv" in line and f" {inode} " in line]
    assert not mine
