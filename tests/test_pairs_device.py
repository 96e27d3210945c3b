"""Stream pairs with models on a device (here the CPU, in plain torch) give the text of one worker. KV arrives
in host memory."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamserve.contracts.transport import TransferError
from streamserve.execution.backends.cuda.landing import KVLanding
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.protocol.config import ModelConfig, WorkerConfig
from streamserve.transfer.pools import Pools
from streamserve.workers.kv_ports import transport_of
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.execution.kv_spec import SPEC
from tests.pairs import answers, fleet, make_requests, serving, until, wait_until_idle


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("device"))


@pytest.mark.parametrize("draft", ["none", "self:1", "model"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
async def test_pairs_on_a_device_give_the_text_of_one_worker(
    checkpoint: Path, scale: Scale, transport: str, draft: str, record: Callable[..., None]
) -> None:
    """Pairs on a device give the text of one worker, as processes that die once each."""
    if not scale.full:
        pytest.skip("with --full: servers")
    folder, requests = checkpoint, make_requests(40, scale.seed)
    drafting = {"draft": str(folder) if draft == "model" else draft, "speculation_policy": "fixed:2"}
    settings = {"backend": "device"} | (drafting if draft != "none" else {"draft": "none"})
    async with serving(folder, backend="device", draft="none") as llm:
        expected = await answers(llm, requests)
    async with serving(folder, pairs=1, kv_transport=transport, **settings) as llm:
        assert tokens_of(await answers(llm, requests)) == tokens_of(expected)
        await wait_until_idle(llm)
        report = llm.report()
        assert report is not None
        assert report.transfer is not None
        assert report.transfer.sent_bytes > 0
        assert not report.transfer.failed
        assert draft == "none" or report.speculation.accepted > 0
        for victims in (("decode-0",), ("prefill-0", "decode-0")):
            working = asyncio.create_task(answers(llm, requests))
            await until(lambda: any(any(r.outputs.values()) for r in fleet(llm).requests.values()))
            for victim in victims:
                os.kill(llm.process_id(victim), signal.SIGKILL)
            assert tokens_of(await working) == tokens_of(expected)
            await wait_until_idle(llm)
    record(requests=3 * len(requests), sent_bytes=report.transfer.sent_bytes)


def tokens_of(answered: list[dict[int, list[tuple[int, float]]]]) -> list[dict[int, list[int]]]:
    """Return only tokens: the bits of a row depend on its batch, so log-probabilities differ in their last
    digits."""
    return [{choice: [token for token, _ in pairs] for choice, pairs in one.items()} for one in answered]


def test_nixl_from_a_device_is_refused_by_name() -> None:
    caches = [KVCache(SPEC, 3, 4, torch.float32)]
    landing = KVLanding(caches, 2, torch.zeros(2 * caches[0].as_bytes()[:, :1].numel(), dtype=torch.uint8))
    model = ModelConfig(path="", backend="device")
    config = WorkerConfig(worker="prefill-0/1", role="prefill", endpoint="", model=model, kv_transport="nixl")
    with pytest.raises(TransferError, match="--kv-transport nixl does not send from a GPU's memory"):
        transport_of(config, Pools(landing.pools), "", landing)
