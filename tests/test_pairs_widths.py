"""Stream pairs with 8-bit and 4-bit weights, speculation, and KV in either width give the text of one worker,
also when both workers die."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.pairs import answers, fleet, make_requests, serving, until, wait_until_idle

ALWAYS = ("int8", "auto")
"""The case that also runs without --full."""


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "int4:32"])
async def test_pairs_at_each_width(
    tmp_path: Path, scale: Scale, quantization: str, kv: str, record: Callable[..., None]
) -> None:
    if not scale.full and (quantization, kv) != ALWAYS:
        pytest.skip("with --full")
    folder = make_checkpoint(tmp_path, dtype="bfloat16")
    settings = {"draft": "self:1", "speculation_policy": "fixed:2", "quantization": quantization}
    settings["kv_cache_dtype"] = kv
    requests = make_requests(scale.pick(12, 40), scale.seed)
    async with serving(folder, **settings) as llm:
        expected = await answers(llm, requests)
    async with serving(folder, pairs=1, **settings) as llm:
        assert llm.model.quantization.startswith(quantization)
        assert await answers(llm, requests) == expected
        await wait_until_idle(llm)
        report = llm.report()
        assert report is not None
        assert report.transfer is not None
        assert report.transfer.sent_bytes > 0
        assert not report.transfer.failed
        assert report.speculation.accepted > 0
        working = asyncio.create_task(answers(llm, requests))
        await until(lambda: any(any(r.outputs.values()) for r in fleet(llm).requests.values()))
        for worker in ("prefill-0", "decode-0"):
            os.kill(llm.process_id(worker), signal.SIGKILL)
        assert await working == expected
        await until(lambda: all(worker.incarnation == 2 for worker in fleet(llm).workers.values()))
        await wait_until_idle(llm)
    record(requests=2 * len(requests), sent_bytes=report.transfer.sent_bytes)
