"""KV transfers by NIXL between machines (network and process namespaces), over UCX's TCP, give the text of
one local worker, through killed workers and a cut link."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from streamserve.llm.async_llm import AsyncLLM
from streamserve.settings.options import SettingsError
from streamserve.settings.resolve import resolve
from streamserve.system.nixl import NIXL_MISSING, nixl_package
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.extras.cluster.fakes import key_file
from tests.extras.cluster.machines import machines
from tests.extras.cluster.namespaces import why_not_permitted
from tests.extras.cluster.ray_machines import HERE
from tests.pairs import Answers, answers, fleet, make_requests, serving, until, wait_until_idle

MISSING = "" if nixl_package() else NIXL_MISSING
NEEDS_NIXL = pytest.mark.skipif(bool(MISSING), reason=MISSING)
REFUSED = MISSING or why_not_permitted()
LEASE = 2.0
UCX = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}


@NEEDS_NIXL
def test_nixl_between_machines_needs_a_trusted_network(tmp_path: Path) -> None:
    settings = {"launcher": "join", "join_key": str(key_file(tmp_path)), "pairs": 1, "kv_transport": "nixl"}
    with pytest.raises(SettingsError, match="has no keys: every program that reaches its ports"):
        resolve("embedded", settings)
    assert resolve("embedded", settings | {"kv_trusted_network": True}).server.kv_trusted_network
    for other in ({"kv_transport": "tcp"}, {"launcher": "local", "join_key": None}):
        with pytest.raises(SettingsError, match="kv_trusted_network"):
            resolve("embedded", settings | {"kv_trusted_network": True} | other)


async def answered(llm: AsyncLLM, count: int, seed: int) -> "asyncio.Task[Answers]":
    """Return the task of requests, some of which have been partly answered."""
    task = asyncio.create_task(answers(llm, make_requests(count, seed)))
    await until(lambda: any(any(r.outputs.values()) for r in fleet(llm).requests.values()))
    return task


@pytest.mark.skipif(bool(REFUSED), reason=REFUSED)
async def test_a_lost_peer_costs_time_never_text(
    tmp_path: Path, scale: Scale, record: Callable[..., None]
) -> None:
    """A lost peer costs time and never changes the text. Each half of the pair is killed; with --full each
    link is also cut for longer than its lease."""
    checkpoint, count = make_checkpoint(tmp_path / "model"), scale.pick(16, 60)
    async with serving(checkpoint) as llm:
        expected = await answers(llm, make_requests(count, scale.seed))
    faults = [("killed", "decode-0"), ("killed", "prefill-0"), ("cut", "prefill-0"), ("cut", "decode-0")]
    with mock.patch.dict(os.environ, UCX), machines(2, tmp_path, HERE) as made:
        for number in (1, 2):
            made.join(number)
        nixl = {"kv_transport": "nixl", "kv_trusted_network": True}
        async with serving(checkpoint, pairs=1, **nixl, **made.settings(LEASE)) as llm:
            assert await answers(llm, make_requests(count, scale.seed)) == expected
            await wait_until_idle(llm)
            report = llm.report()
            assert report is not None
            assert report.transfer is not None
            assert report.transfer.sent_bytes > 0
            assert report.transfer.handed_over == report.transfer.received > 0
            assert not report.transfer.failed
            for fault, victim in faults[: scale.pick(2, 4)]:
                worker = fleet(llm).workers[victim]
                before, number = worker.incarnation, made.machine_of(victim)
                task = await answered(llm, count, scale.seed)
                if fault == "killed":
                    os.kill(made.workers(number)[0].pid, signal.SIGKILL)
                else:
                    made.net.cut(number)
                    await asyncio.sleep(1.5 * LEASE)
                    made.net.restore(number)
                assert await asyncio.wait_for(task, 120) == expected, (fault, victim)
                await until(lambda: fleet(llm).workers[victim].incarnation > before)  # noqa: B023
                await until(lambda: all(state.ready for state in fleet(llm).workers.values()))
                assert await answers(llm, make_requests(count, scale.seed)) == expected, (fault, victim)
                await wait_until_idle(llm)
    record(requests=count, sent_bytes=report.transfer.sent_bytes, handed_over=report.transfer.handed_over)
