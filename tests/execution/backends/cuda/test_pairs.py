"""Prefill and decode workers with models on a device: KV arrives in host memory and is copied from there, and
the text equals a single worker's."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamserve.engine.engine import Engine
from streamserve.engine.ports import EnginePorts
from streamserve.execution.backends.cuda.device import _in_turn, budget_bytes
from streamserve.execution.backends.cuda.landing import KVLanding
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.compute.memory import HostShare
from streamserve.execution.loading.device_limits import check_landing
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded, PoolSizes
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.messages import Pushed, Reserved, Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.protocol.transfers import Join, Push
from streamserve.transfer.pools import Pools
from streamserve.transfer.shared_memory import SharedMemory, SharedMemoryTransport
from tests.conftest import Scale
from tests.execution.kv_spec import SPEC

Shared = Callable[..., Path]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "8-bit KV": {"kv_cache_dtype": "int8"},
    "preempted": {"preempt_every": 5},
}


class Half:
    """A prefill or a decode worker's engine, with its transport, in this process."""

    def __init__(self, name: str, folder: Path, **fields: Any) -> None:
        self.memory = SharedMemory()
        config = ModelConfig(
            path=str(folder), backend="device", threads=1, num_blocks=60, block_size=4, max_chunk=16,
            max_model_len=120, check=True, **fields,
        )  # fmt: skip
        self.loaded: Loaded = load(config, allocate=self.memory.allocate)
        assert self.loaded.landing
        pools = Pools([cache.as_bytes()[:, :60] for cache in self.loaded.caches], self.loaded.cache.written)
        self.transport = SharedMemoryTransport(pools, "model")
        ports = EnginePorts(
            name, self.transport, self.memory.address(60, "model"), landing=self.loaded.landing
        )
        self.engine = Engine(
            self.loaded.engine_config, self.loaded.model_info, self.loaded.executor, lambda: 0.0, ports=ports
        )

    def turn(self) -> list[Any]:
        """Return the events of a step and of the transfers that completed after it."""
        events: list[Any] = self.engine.step() if self.engine.has_work else []
        return events + list(self.engine.transfers.take_updates())

    def close(self) -> None:
        self.transport.close()
        self.loaded.executor.close()


def alone(folder: Path, prompt: list[int], params: SamplingParams, **fields: Any) -> list[int]:
    half = Half("unified", folder, **fields)
    half.engine.handle(Submit("r", prompt, params, outputs={0: []}))
    tokens = [event.token for _ in range(200) for event in half.turn() if isinstance(event, Token)]
    half.close()
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_decode_half_goes_on_with_the_kv_that_landed(
    shared_checkpoint: Shared, kind: str, scale: Scale
) -> None:
    """The decode worker continues with the KV that arrived. The test sends the fleet's messages itself:
    reserve, push, join."""
    if not scale.full and kind == "preempted":
        pytest.skip("with --full")
    folder, fields = shared_checkpoint(), KINDS[kind]
    prompt = [5, 80, 33, 9, 41, 7] * 9
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    expected = alone(folder, prompt, params, **fields)
    prefill, decode = Half("p", folder, **fields), Half("d", folder, **fields)
    prefill.engine.handle(Submit("r", prompt, params, outputs={0: []}, phase="prefill"))
    decode.engine.handle(Submit("r", prompt, params, outputs={0: []}, phase="decode"))
    tokens: list[int] = []
    deadline = time.monotonic() + 60
    while len(tokens) < 20:
        assert time.monotonic() < deadline
        events = (*prefill.turn(), *decode.turn())
        if not events:
            time.sleep(0.001)  # The transport's thread is sending.
        for event in events:
            if isinstance(event, Reserved):
                prefill.engine.handle(Push(event.reservation))
            elif isinstance(event, Pushed):
                assert not event.error
                assert event.sent > 0
                decode.engine.handle(Join("r", 0, event.reservation_id, {0: list(tokens)}, {}))
            elif isinstance(event, Token):
                tokens.append(event.token)
    assert tokens == expected
    assert decode.loaded.landing
    assert decode.loaded.landing.taken == -(-len(prompt) // 4)
    report = decode.engine.report().transfer
    assert report
    assert report.received_tokens == len(prompt)
    for half in (prefill, decode):
        half.close()


def test_landed_blocks_are_copied_and_no_others() -> None:
    caches = [
        KVCache(spec, 9, 4, torch.float32, device=DEVICE, quantized=quantized)
        for spec, quantized in ((SPEC.first_layers(1), False), (SPEC, True))
    ]
    size = sum(cache.as_bytes()[:, :8].numel() for cache in caches)
    generator = torch.Generator().manual_seed(0)
    memory = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
    landing = KVLanding(caches, 8, memory)
    assert sum(pool.numel() for pool in landing.pools) == size
    for cache in caches:
        cache.as_bytes().zero_()
    landing.land([])
    landing.land([6, 0, 3])
    for cache, pool in zip(caches, landing.pools, strict=True):
        copied = cache.as_bytes().cpu()
        assert torch.equal(copied[:, [6, 0, 3]], pool[:, [6, 0, 3]])
        assert not copied[:, [1, 2, 4, 5, 7, 8]].any()
    assert landing.taken == 3


def test_a_row_is_ready_when_the_step_that_writes_it_is_finished(shared_checkpoint: Shared) -> None:
    half = Half("p", shared_checkpoint())
    written = half.loaded.cache.written
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    half.engine.handle(Submit("r", [5, 6, 7], params, outputs={0: []}))
    before, layers = int(written[0]), half.loaded.model.spec.num_layers
    half.turn()
    assert np.all(written == before + layers)
    half.close()


def test_workers_are_divided_among_the_gpus_and_their_memory() -> None:
    placed = [_in_turn(HostShare(number, 5), 2) for number in range(5)]
    assert [device.index for device, _ in placed] == [0, 1, 0, 1, 0]
    assert [round(1 / share) for _, share in placed] == [3, 2, 3, 2, 3]
    assert _in_turn(HostShare(), 8) == (torch.device("cuda", 0), 1.0)
    assert _in_turn(HostShare(2, 1), 2)[1] == 1.0


def test_workers_of_a_device_divide_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 80))
    gpu = torch.device("cuda", 1)
    assert [budget_bytes(gpu, share) for share in (1.0, 0.5)] == [70, 40]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 80))
    assert budget_bytes(gpu, 0.5) == 30, "other processes have the other processors"


def test_host_memory_that_does_not_suffice_is_refused_by_name() -> None:
    check_landing(PoolSizes(10, 1 << 20, 0, 0, 100), 10 << 20)
    with pytest.raises(CheckpointError, match=r"10 MiB, but 9 MiB are free .* --kv-cache-bytes"):
        check_landing(PoolSizes(10, 1 << 20, 0, 0, 100), 9 << 20)


@pytest.mark.parametrize("share", [HostShare(0, 2), HostShare()])
def test_ranks_of_a_pair_are_refused_by_name(shared_checkpoint: Shared, share: HostShare) -> None:
    config = ModelConfig(
        path=str(shared_checkpoint()), device="cpu", backend="device", tensor_parallel_size=2
    )
    memory = SharedMemory()
    with pytest.raises(CheckpointError, match="--tensor-parallel-size 2 requires a single worker"):
        load(config, share=share, allocate=memory.allocate)
    assert memory.size == 0
