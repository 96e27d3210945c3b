"""With NIXL between machines, no write of a lost writer arrives late."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from streamserve.contracts.transport import Landed
from streamserve.extras.nixl.nixl import NixlTransport
from streamserve.extras.nixl.nixl_memory import Fence, NixlMemory
from streamserve.system.nixl import NIXL_MISSING, nixl_package
from streamserve.transfer.pools import Pools

pytestmark = pytest.mark.skipif(nixl_package() is None, reason=NIXL_MISSING)

LAYERS, BLOCKS, WIDTH = 2, 8, 1 << 20
FINGERPRINT = "model/16/1"


class Deaf:
    """An agent that does not read arrived data, so that over TCP the data remains in flight."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def get_new_notifs(self) -> None:
        pass


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlMemory]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    made = NixlMemory(machines=True)
    yield made
    made.close()


@pytest.fixture
def there(memory: NixlMemory) -> torch.Tensor:
    return memory.allocate(LAYERS * BLOCKS * WIDTH).view(LAYERS, BLOCKS, WIDTH)


@pytest.fixture
def writer(there: torch.Tensor) -> Iterator[NixlTransport]:
    own = torch.full((LAYERS, BLOCKS, WIDTH), 7, dtype=torch.uint8)
    made = NixlTransport(Pools([own]), FINGERPRINT, machines=True)
    yield made
    made.close()


@pytest.fixture
def gate(memory: NixlMemory) -> Fence:
    assert memory.gate is not None
    return memory.gate


def wait(writer: NixlTransport) -> Landed:
    deadline = time.monotonic() + 20
    while not (landed := writer.landed()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return landed[0]


def test_what_is_on_the_way_when_a_doubtful_reservation_is_closed_does_not_arrive(
    memory: NixlMemory, there: torch.Tensor, writer: NixlTransport, gate: Fence
) -> None:
    """Data in flight does not arrive after a doubtful reservation was closed. The writer learns of it by its
    connection, reaches the new address, and no longer reaches the old one."""
    old = memory.address(BLOCKS, FINGERPRINT)
    gate.open("a", [1])
    writer.check(old)
    writer.push(old, [(0, 1)])
    assert not wait(writer).error
    assert there[:, 1].eq(7).all()

    with memory._lock:
        memory._agent = Deaf(memory._agent)
    gate.open("b", [2, 3])
    writer.push(old, [(0, 2), (1, 3)])
    time.sleep(0.3)
    assert not writer.landed(), "the write is in flight"
    new = gate.close("b", doubtful=True)
    assert new is not None
    assert new.agent != old.agent
    assert "DISCONNECT" in wait(writer).error
    writer.push(old, [(0, 4)])
    assert wait(writer).error
    time.sleep(0.3)
    assert not there[:, 2:].any()

    writer.check(new)
    writer.push(new, [(0, 5)])
    assert not wait(writer).error
    assert there[:, 5].eq(7).all()


def test_the_agent_is_renewed_once_for_all_reservations_of_its_time(
    memory: NixlMemory, there: torch.Tensor, gate: Fence
) -> None:
    memory.address(BLOCKS, FINGERPRINT)
    for name in ("a", "b", "c"):
        gate.open(name, [1])
    assert gate.close("a") is None, "its writer has written all of it"
    assert gate.close("b", doubtful=True) is not None
    assert gate.close("c", doubtful=True) is None, "its writer had the address of the agent that has ended"
    assert gate.close("b", doubtful=True) is None
    assert memory.generation == 1
