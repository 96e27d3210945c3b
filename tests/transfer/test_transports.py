"""A KV transfer into another process's pool writes exactly the pushed blocks; other writes are refused."""

import gc
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import torch

from streamserve.contracts.transport import Landed, TransferError
from streamserve.extras.nixl.nixl import SUSPECT_SECONDS, NixlTransport
from streamserve.extras.nixl.nixl_memory import NixlMemory
from streamserve.protocol.transfers import CacheAddress
from streamserve.system.nixl import NIXL_MISSING, nixl_package
from streamserve.transfer.pools import Pools
from streamserve.transfer.shared_memory import SharedMemory, SharedMemoryTransport

Memory = SharedMemory | NixlMemory
Transport = SharedMemoryTransport | NixlTransport
NEEDS_NIXL = pytest.mark.skipif(nixl_package() is None, reason=NIXL_MISSING)

LAYERS, BLOCKS, WIDTH = 3, 8, 32
FINGERPRINT = "model/16/1"


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.randint(0, 256, (LAYERS, 5, WIDTH), dtype=torch.uint8)


@pytest.fixture(params=["shm", pytest.param("nixl", marks=NEEDS_NIXL)])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(kind: str) -> Iterator[Callable[..., Transport]]:
    """Return a function that makes a transport of this kind, which is closed after the test."""
    made: list[Transport] = []

    def make(pool: torch.Tensor | Pools, bytes_per_second: float | None = None) -> Transport:
        cls = NixlTransport if kind == "nixl" else SharedMemoryTransport
        pools = pool if isinstance(pool, Pools) else Pools([pool])
        made.append(cls(pools, FINGERPRINT, bytes_per_second))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def transport(make: Callable[..., Transport], pool: torch.Tensor) -> Transport:
    return make(pool)


@pytest.fixture
def receiving(kind: str) -> Iterator[tuple[torch.Tensor, CacheAddress]]:
    """Return a writable pool and its address."""
    memory: Memory = NixlMemory() if kind == "nixl" else SharedMemory()
    pool = memory.allocate(LAYERS * BLOCKS * WIDTH).view(LAYERS, BLOCKS, WIDTH)
    yield pool, memory.address(BLOCKS, FINGERPRINT)
    memory.close()


RECEIVER = f"""
import sys
from msgspec.json import encode
from streamserve.extras.nixl.nixl_memory import NixlMemory
from streamserve.transfer.pools import Pools
from streamserve.transfer.shared_memory import SharedMemory
memory = NixlMemory() if sys.argv[1] == "nixl" else SharedMemory()
pool = memory.allocate({LAYERS * BLOCKS * WIDTH}).view({LAYERS}, {BLOCKS}, {WIDTH})
print(encode(memory.address({BLOCKS}, "{FINGERPRINT}")).decode(), flush=True)
for line in sys.stdin:
    print(pool[:, int(line)].flatten().tolist(), flush=True)
"""


@pytest.fixture
def other(kind: str) -> Iterator[tuple[subprocess.Popen[str], CacheAddress]]:
    """A process with a pool, which prints the content of a block."""
    command = [sys.executable, "-c", RECEIVER, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, msgspec.json.decode(process.stdout.readline(), type=CacheAddress)
        process.kill()


def wait(transport: Transport, jobs: int) -> list[Landed]:
    landed: list[Landed] = []
    deadline = time.monotonic() + 20
    while len(landed) < jobs:
        landed += transport.landed()
        assert time.monotonic() < deadline
    return landed


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


Receiving = tuple[torch.Tensor, CacheAddress]
Other = tuple[subprocess.Popen[str], CacheAddress]


def test_blocks_arrive_at_their_destinations(
    transport: Transport, pool: torch.Tensor, receiving: Receiving
) -> None:
    target, address = receiving
    transport.check(address)
    jobs = [transport.push(address, [(0, 7), (4, 2)]), transport.push(address, [(1, 3)])]
    landed = sorted(wait(transport, 2), key=lambda one: one.job)
    assert landed == [Landed(jobs[0], 2 * LAYERS * WIDTH), Landed(jobs[1], LAYERS * WIDTH)]
    for own, there in ((0, 7), (4, 2), (1, 3)):
        assert torch.equal(target[:, there], pool[:, own])
    untouched = [0, 1, 4, 5, 6]
    assert not target[:, untouched].any()


def test_each_layer_is_sent_as_soon_as_a_step_has_written_it(
    make: Callable[..., Transport], pool: torch.Tensor, receiving: Receiving
) -> None:
    """Each layer is sent as soon as a step has written it. The first layer belongs to a draft model, which
    has read the prompt before."""
    target, address = receiving
    written = np.full(1, 40, np.int64)
    transport = make(Pools([pool[:1], pool[1:]], written))
    transport.check(address)
    job = transport.push(address, [(0, 7), (4, 2)], upcoming=True)
    for layer in range(LAYERS - 1):
        until(lambda layer=layer: torch.equal(target[layer, [7, 2]], pool[layer, [0, 4]]))
        assert not target[layer + 1 :].any()
        assert transport.landed() == []
        written += 1
    assert wait(transport, 1) == [Landed(job, 2 * LAYERS * WIDTH)]


def test_a_push_that_waits_for_a_step_does_not_block_shutdown(
    make: Callable[..., Transport], pool: torch.Tensor, receiving: Receiving
) -> None:
    transport = make(Pools([pool], np.zeros(1, np.int64)))
    transport.check(receiving[1])
    transport.push(receiving[1], [(0, 7)], upcoming=True)
    transport.close()
    assert not receiving[0].any()


def test_the_receiver_may_be_another_process(transport: Transport, pool: torch.Tensor, other: Other) -> None:
    process, address = other
    assert process.stdin is not None
    assert process.stdout is not None
    transport.check(address)
    transport.push(address, [(2, 6)])
    assert wait(transport, 1)[0].sent > 0
    process.stdin.write("6\n")
    process.stdin.flush()
    assert process.stdout.readline().strip() == str(pool[:, 2].flatten().tolist())


def test_pushes_to_a_dead_process_fail(
    make: Callable[..., Transport], pool: torch.Tensor, other: Other, receiving: Receiving
) -> None:
    process, address = other
    transport = make(pool)
    transport.check(address)
    process.kill()
    process.wait()
    with pytest.raises(TransferError, match="cannot be opened"):
        make(pool).check(address)
    transport.check(receiving[1])  # releases the memory of dead processes
    transport.push(address, [(0, 0)])
    (landed,) = wait(transport, 1)
    assert "gone" in landed.error


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fingerprint": "other/16/1"}, "does not fit"),
        ({"size": 5}, "is not 8 blocks"),
        ({"num_blocks": 9}, "is not 9 blocks"),
        ({"inode": 1}, "now belongs to other memory"),
        ({"path": "/proc/self/fd/999"}, "cannot be opened"),
    ],
)
def test_a_forged_or_stale_address_is_refused(
    transport: Transport, receiving: Receiving, changed: dict[str, object], message: str
) -> None:
    target, address = receiving
    with pytest.raises(TransferError, match=message):
        transport.check(msgspec.structs.replace(address, **changed))
    assert not target.any()


@pytest.mark.parametrize("there", [BLOCKS, -1])
def test_blocks_out_of_range_are_an_error(transport: Transport, receiving: Receiving, there: int) -> None:
    target, address = receiving
    transport.check(address)
    transport.push(address, [(0, there)])
    (landed,) = wait(transport, 1)
    assert landed.error
    assert landed.sent == 0
    assert not target.any()


def test_the_rate_limit_is_observed(
    make: Callable[..., Transport], pool: torch.Tensor, receiving: Receiving
) -> None:
    transport = make(pool, LAYERS * WIDTH * 10)
    _, address = receiving
    transport.check(address)
    started = time.monotonic()
    transport.push(address, [(0, 0), (1, 1)])
    wait(transport, 1)
    assert time.monotonic() - started >= 0.2


@pytest.mark.parametrize("kind", ["shm"], indirect=True)
def test_memory_of_dead_processes_is_released(
    transport: Transport, other: Other, receiving: Receiving
) -> None:
    """Opening a pool releases the memory of pools whose processes have ended."""
    process, address = other
    transport.check(address)
    process.kill()
    process.wait()
    transport.check(receiving[1])
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mine = [line for line in maps if "streamserve-kv" in line and f" {address.inode} " in line]
    assert not mine


@pytest.mark.parametrize("kind", [pytest.param("nixl", marks=NEEDS_NIXL)], indirect=True)
@pytest.mark.parametrize("changed", [{"agent": b"forged"}, {"base": 4096}])
def test_nixl_writes_only_what_the_other_agent_registered(
    transport: Transport, receiving: Receiving, changed: dict[str, object]
) -> None:
    with pytest.raises(TransferError, match="cannot be written"):
        transport.check(msgspec.structs.replace(receiving[1], **changed))


@pytest.mark.parametrize("kind", [pytest.param("nixl", marks=NEEDS_NIXL)], indirect=True)
def test_a_push_to_a_stopped_process_is_in_flight_until_its_death(transport: Transport, other: Other) -> None:
    process, address = other
    transport.check(address)
    process.send_signal(signal.SIGSTOP)
    job = transport.push(address, [(0, 0)])
    time.sleep(2 * SUSPECT_SECONDS)
    assert transport.landed() == [], "a write cannot be cancelled: it must not be reported as ended"
    process.kill()
    process.wait()
    (landed,) = wait(transport, 1)
    assert (landed.job, landed.sent) == (job, 0)
    assert landed.error
