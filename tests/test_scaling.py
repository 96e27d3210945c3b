"""Workers can be added and removed while a server of real processes answers."""

import asyncio
from pathlib import Path

import psutil
import pytest

from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.errors import RequestError
from streamserve.settings.options import SettingsError
from streamserve.settings.resolve import resolve
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.pairs import answers, fleet, make_requests, serving, until, wait_until_idle


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("scaling"))


async def test_workers_are_added_and_removed_while_serving(checkpoint: Path, scale: Scale) -> None:
    """The initial worker is removed while it answers, and its requests continue on the added worker."""
    requests = make_requests(scale.pick(12, 60), scale.seed)
    async with serving(checkpoint, max_workers=2) as llm:
        first = psutil.Process(llm.process_id("unified-0"))
        with pytest.raises(RequestError, match="no worker, or only one half"):
            await llm.remove_workers("unified-0")
        expected = await answers(llm, requests)
        assert await llm.add_workers("unified") == ("unified-1",)
        with pytest.raises(RequestError, match=r"2 of at most 2 workers are running: .*--max-workers"):
            await llm.add_workers("unified")
        await until(lambda: fleet(llm).workers["unified-1"].ready is not None)
        assert {worker.host for worker in llm.routing().workers} == {llm.routing().machines[0].name}
        asked = asyncio.create_task(answers(llm, requests))
        await until(
            lambda: any(
                any(r.outputs.values()) for r in fleet(llm).requests.values() if r.worker == "unified-0"
            )
        )
        removal = await llm.remove_workers("unified-0", within=0.0)
        assert removal.workers == ("unified-0",)
        with pytest.raises(RequestError, match=r"is being removed|there is no worker"):
            await llm.drain("unified-0", False)
        assert await asked == expected
        assert fleet(llm).scaling.moved > 0
        await until(lambda: not first.is_running())
        assert list(fleet(llm).workers) == ["unified-1"]
        assert fleet(llm).supervisor.deaths == 0
        await wait_until_idle(llm)
        assert await answers(llm, requests) == expected


async def test_a_pair_is_added_and_the_first_one_removed(checkpoint: Path, scale: Scale) -> None:
    if not scale.full:
        pytest.skip("with --full; tests/simulate/test_scaling.py has it in virtual time")
    requests = make_requests(scale.pick(12, 60), scale.seed)
    async with serving(checkpoint, pairs=1, max_workers=4) as llm:
        expected = await answers(llm, requests)
        assert await llm.add_workers("pair") == ("prefill-1", "decode-1")
        await until(lambda: all(worker.ready for worker in fleet(llm).workers.values()))
        asked = asyncio.create_task(answers(llm, requests))
        await until(lambda: bool(fleet(llm).requests))
        assert (await llm.remove_workers("pair-0")).workers == ("prefill-0", "decode-0")
        assert await asked == expected
        await until(lambda: set(fleet(llm).workers) == {"prefill-1", "decode-1"})
        assert await answers(llm, requests) == expected
        await wait_until_idle(llm)
        report = llm.report()
        assert report
        assert report.transfer
        assert report.transfer.handed_over > 0


def test_a_bound_below_the_start_is_refused(checkpoint: Path) -> None:
    with pytest.raises(SettingsError, match=r"max_workers = 2: the server starts with 3 workers"):
        resolve(str(checkpoint), {"workers": 3, "max_workers": 2})


async def test_a_router_of_classes_with_sizes_keeps_its_decode_workers(checkpoint: Path) -> None:
    overrides = {"pairs": 2, "router": "classes:20=1,other=1", "max_workers": 6}
    llm = AsyncLLM(resolve(str(checkpoint), overrides))
    with pytest.raises(RequestError, match="its classes have 2 decode workers, but there are 3") as refused:
        await llm.add_workers("pair")
    assert refused.value.status == 409
