"""A head and workers on separate machines (network and process namespaces) give the text of a single local
worker, through killed workers, cut links and stopped machines."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.extras.cluster.machines import Process, machines
from tests.extras.cluster.namespaces import why_not_permitted
from tests.pairs import answers, make_requests, serving

REFUSED = why_not_permitted()
pytestmark = pytest.mark.skipif(bool(REFUSED), reason=REFUSED)
LEASE = 2.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("namespaces"))


def line(head: Process) -> str:
    assert head.stdout
    text = head.stdout.readline().strip()
    assert text, "the head has ended"
    return text


def ask(head: Process, count: int, seed: int, deaths: int = 0) -> None:
    assert head.stdin
    head.stdin.write(json.dumps({"count": count, "seed": seed, "deaths": deaths}) + "\n")
    head.stdin.flush()
    assert line(head) == "running"


def result(head: Process) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(line(head))
    return answer


async def expected(checkpoint: Path, count: int, seed: int) -> list[Any]:
    async with serving(checkpoint) as llm:
        return json.loads(json.dumps(await answers(llm, make_requests(count, seed))))


async def test_a_pair_on_two_machines_gives_the_text_of_one_worker(
    checkpoint: Path, tmp_path: Path, scale: Scale, record: Callable[..., None]
) -> None:
    """A pair on two machines, whose KV goes over TCP, gives the text of one worker. A cut link, and with
    --full a killed worker and a machine stopped beyond its lease, cost time and never change the text."""
    count = scale.pick(12, 60)
    texts = await expected(checkpoint, count, scale.seed)
    with machines(3, tmp_path) as made:
        head = made.head(checkpoint, LEASE, pairs=1)
        for number in (2, 3):
            made.join(number)
        assert line(head) == "ready"
        ask(head, count, scale.seed)
        plain = result(head)
        assert plain["answers"] == [texts]
        assert plain["deaths"] == 0
        assert plain["transfer"]["sent_bytes"] > 0
        assert plain["transfer"]["handed_over"] == plain["transfer"]["received"] > 0
        assert not plain["transfer"]["failed"]
        recovered = {}
        faults = ("cut link", "killed worker", "stopped machine")[: scale.pick(1, 3)]
        for deaths, fault in enumerate(faults, 1):
            ask(head, count, scale.seed, deaths)
            stop = [process.pid for process in made.workers(2)]
            match fault:
                case "cut link":
                    made.net.cut(2)
                    await asyncio.sleep(1.5 * LEASE)
                    assert [process.pid for process in made.workers(2)] == stop, (
                        "the worker has left the head"
                    )
                    made.net.restore(2)
                case "killed worker":
                    os.kill(stop[0], signal.SIGKILL)
                case "stopped machine":
                    below = psutil.Process(made.agents[2].pid).children(recursive=True)
                    for process in below:
                        process.suspend()
                    await asyncio.sleep(1.5 * LEASE)
                    for process in below:
                        process.resume()
            outcome = result(head)
            assert outcome["answers"] == [texts], fault
            assert outcome["deaths"] == deaths, fault
            assert outcome["interrupted"] > 0, fault
            if fault == "cut link":
                assert [process.pid for process in made.workers(2)] == stop, "the worker was adopted"
            recovered[fault] = round(outcome["ready_after"], 2)
        figures = {
            "requests": count, "lease": LEASE, "ready_again": recovered,
            "plain_seconds": round(plain["seconds"], 2), "transfer": plain["transfer"],
        }  # fmt: skip
        record(**figures)
        print(figures)
