"""Split brain: a worker that does not observe its lease writes KV into blocks that belong to another request
by then. The blocks' owner refuses and counts each of these writes, and no text changes."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from streamserve.api.metrics.metrics import Metrics
from streamserve.api.metrics.pool_metrics import exposition_of_all
from streamserve.llm.async_llm import AsyncLLM
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.events import SETTINGS, all_answers, await_event, send_until, undisturbed
from tests.extras.cluster.machines import machines
from tests.extras.cluster.namespaces import why_not_permitted
from tests.extras.cluster.ray_machines import HERE
from tests.pairs import NUMBERS, fleet, make_requests, serving, until, wait_until_idle

REFUSED = why_not_permitted()
pytestmark = pytest.mark.skipif(bool(REFUSED), reason=REFUSED)
LEASE = 2.0
EVENTS = str(Path(__file__).parents[2] / "lifecycle_events")


def refused_writes(llm: AsyncLLM) -> int:
    report = llm.report()
    return report.transfer.refused_writes if report and report.transfer else 0


async def test_writes_of_a_worker_that_comes_back_after_its_lease_are_refused(
    tmp_path: Path, scale: Scale, record: Callable[..., None]
) -> None:
    """The agent of a prefill worker is stopped in the middle of a push, which a slow link holds, until the
    head has closed its reservations and other requests get the blocks. The worker continues while its agent
    is stopped, so nothing ends it."""
    checkpoint = make_checkpoint(tmp_path / "model")
    requests = make_requests(12, scale.seed)
    expected = await undisturbed(checkpoint, requests)
    path = os.pathsep.join([EVENTS, os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "TEST_EVENT_FOLDER": str(tmp_path), "TEST_LATE_WRITES": "1"}
    reached, resume = tmp_path / "reached", tmp_path / "resume"
    resume.touch()
    counts = []
    with mock.patch.dict(os.environ, own), machines(3, tmp_path, HERE) as made:
        for number in (1, 2, 3):
            made.join(number)
        settings = SETTINGS | made.settings(LEASE) | {"prefill": 2, "decode": 1, "stuck_after": 30.0}
        async with serving(checkpoint, **settings) as llm:
            await llm.check_grammar(NUMBERS, "grammar")  # so that all requests can be sent at the same time
            state = fleet(llm)
            owner = state.workers["decode-0"].incarnation
            for attempt in range(1, 1 + scale.pick(1, 4)):
                reached.unlink(missing_ok=True)
                await_event(tmp_path, attempt, 1, "mid-layer push")
                resume.unlink()
                refused = refused_writes(llm)
                working = await send_until(reached, llm, requests, expected)
                writer = reached.read_text()
                number = made.machine_of(writer)
                agent = made.agent(number)
                agent.suspend()
                assert state.transfers.reservations.involve(writer)
                await until(lambda: not state.transfers.reservations.involve(writer))  # noqa: B023
                assert refused_writes(llm) == refused
                assert await asyncio.wait_for(working, 60) == expected

                again = asyncio.create_task(all_answers(llm, requests))
                await until(lambda: any(any(r.outputs.values()) for r in state.requests.values()))
                resume.touch()
                await until(lambda: refused_writes(llm) > refused)  # noqa: B023
                assert await asyncio.wait_for(again, 60) == expected
                agent.resume()
                await until(lambda: all(worker.ready for worker in state.workers.values()))
                assert await all_answers(llm, requests) == expected
                await wait_until_idle(llm)
                counts.append(refused_writes(llm) - refused)
            assert state.workers["decode-0"].incarnation == owner
            metrics = Metrics("model", llm.report, llm.incidents, llm.routing)
            text = exposition_of_all([metrics.collector]).decode()
            (line,) = (line for line in text.splitlines() if "kv_transfer_refused_writes_total{" in line)
            assert float(line.rpartition(" ")[2]) == sum(counts)
    record(lease=LEASE, refused_writes=counts)
    print(counts)
