"""Workers that Ray places on two nodes give the text of one local worker, also when actors and nodes die."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from streamserve.extras.cluster.ray_launcher import RayLauncher, cpus_of_each, groups, made_for, unneeded
from streamserve.fleet.launcher import MachineState
from streamserve.llm.async_llm import AsyncLLM
from tests.checkpoints import make_checkpoint
from tests.pairs import answers, fleet, make_requests, serving, until, wait_until_idle

COUNT = 12
Head = subprocess.Popen[str]


def test_the_halves_of_a_pair_are_placed_together() -> None:
    assert groups(["unified-0", "prefill-0", "prefill-1", "decode-0"]) == [
        ("unified-0",),
        ("prefill-0", "decode-0"),
        ("prefill-1",),
    ]


def test_workers_share_the_processors_of_all_machines() -> None:
    assert cpus_of_each([16.0, 16.0], 4) == 8
    assert cpus_of_each([16.0, 4.0], 2) == 4, "each fits into the smallest machine"
    assert cpus_of_each([2.0], 8) == 1


def machine(name: str, *workers: str) -> MachineState:
    return MachineState(name, 1, workers, 0.0, 0.0)


def test_agents_that_have_no_machine_are_ended_first_and_busy_ones_never() -> None:
    workers = ["unified-0", "unified-3"]
    kept = ["unified-0", "unified-1", "unified-2", "unified-3"]
    machines = [machine("a.unified-0", "unified-3"), machine("b.unified-1"), machine("c.x.unified-3")]
    assert unneeded(kept, workers, machines) == ["unified-2", "unified-1", "unified-3"]
    twice = [machine("a.unified-0"), machine("a.unified-0#2", "unified-0")]
    assert made_for(twice[1]) == "unified-0"
    assert unneeded(["unified-0"], workers, twice) == []


def test_nothing_of_ray_is_imported_before_its_launcher_is_made() -> None:
    code = (
        "import sys, streamserve.cli.run_server, streamserve.extras.cluster.run_worker, streamserve.llm.llm\n"
        "import streamserve.extras.cluster.ray_agent, streamserve.extras.cluster.ray_launcher\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'ray'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="needs Ray: pip install 'streamserve[ray]'")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ray"))


def launcher(llm: AsyncLLM) -> RayLauncher:
    made = llm._runtime.driver.launcher
    assert isinstance(made, RayLauncher)
    return made


def machines(llm: AsyncLLM) -> dict[str, str]:
    """Return the agents that have joined, by the worker that each was made for, with the identity of its
    node."""
    agents = launcher(llm)._join.registry.agents.values()
    return {agent.name.rpartition(".")[2]: agent.name for agent in agents}


async def test_ray_places_workers(cluster: Any, checkpoint: Path) -> None:
    """Ray places workers. When an actor dies, and then the node with all workers, it costs time and never
    changes the text."""
    import ray

    nodes = [cluster.add_node(num_cpus=2, resources={"place": 2}) for _ in range(2)]
    async with serving(checkpoint) as llm:
        expected = await answers(llm, make_requests(COUNT, 3))
    settings = {"launcher": "ray", "ray_address": cluster.address, "ray_resources": ("place=1",), "pairs": 1}
    async with serving(checkpoint, **settings, join_lease=2.0) as llm:
        assert set(machines(llm)) == {"prefill-0", "decode-0"}
        assert await answers(llm, make_requests(COUNT, 3)) == expected
        await wait_until_idle(llm)
        report = llm.report()
        assert report is not None
        assert report.transfer is not None
        assert report.transfer.handed_over > 0

        kept, deaths = launcher(llm)._kept, 0
        for end in ("actor", "node"):
            asked = asyncio.create_task(answers(llm, make_requests(COUNT, 3)))
            await until(lambda: any(any(r.outputs.values()) for r in fleet(llm).requests.values()))
            if end == "actor":
                ray.kill(kept["decode-0"].actor)
            else:
                await asyncio.to_thread(cluster.remove_node, _used(nodes))
            assert await asked == expected, end
            await until(lambda: fleet(llm).supervisor.deaths > deaths)  # noqa: B023
            await until(lambda: all(worker.ready for worker in fleet(llm).workers.values()))
            deaths = fleet(llm).supervisor.deaths
        assert await answers(llm, make_requests(COUNT, 3)) == expected
    assert not ray.is_initialized()


def _used(nodes: list[Any]) -> Any:
    """Return the node whose slots are used."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    (node,) = (node for node in nodes if not free[node.node_id].get("place"))
    return node


async def test_added_workers_are_placed_and_removed_ones_ask_for_nothing(
    cluster: Any, checkpoint: Path
) -> None:
    """Added workers are placed together: a pair is one placement group. A pair without a machine is removed,
    and Ray is not asked for it again. The previous handler of SIGTERM is restored."""
    from ray.util import placement_group_table

    cluster.add_node(num_cpus=4, resources={"here": 4})
    settings = {"launcher": "ray", "ray_address": cluster.address, "ray_resources": ("here=1",), "pairs": 1}
    previous = signal.getsignal(signal.SIGTERM)
    async with serving(checkpoint, **settings, max_workers=6) as llm:
        assert signal.getsignal(signal.SIGTERM) is previous
        for count, names in ((2, ["prefill-1", "decode-1"]), (3, ["prefill-2", "decode-2"])):
            assert await llm.add_workers("pair", 1) == tuple(names)
            await until(lambda: set(launcher(llm)._kept) == set(fleet(llm).workers))
            await until(lambda: len(_groups(placement_group_table())) == count)  # noqa: B023
        await until(lambda: all(fleet(llm).workers[name].ready for name in ("prefill-1", "decode-1")))
        assert await answers(llm, make_requests(COUNT, 3))
        assert llm._runtime.waiting() == ["decode-2", "prefill-2"], "there is no machine for them"
        for count, pair in ((2, "pair-2"), (1, "pair-1")):
            await llm.remove_workers(pair, 5.0)
            await until(lambda: len(launcher(llm)._kept) == 2 * count)  # noqa: B023
            await until(lambda: len(_groups(placement_group_table())) == count)  # noqa: B023
        assert await answers(llm, make_requests(COUNT, 3))


def _groups(table: dict[str, Any]) -> list[str]:
    """Return the placement groups that have resources, or wait for them."""
    return [name for name, group in table.items() if group["state"] != "REMOVED"]


@contextmanager
def head(checkpoint: Path, cluster: Any) -> Iterator[Head]:
    """A head with a pair in another process (tests/extras/cluster/head.py), which is a separate program for
    Ray."""
    settings = {"launcher": "ray", "ray_address": cluster.address, "ray_resources": ("head=1",), "pairs": 1}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.extras.cluster.head", str(checkpoint),
         json.dumps(settings | {"threads": 1})],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ask(head: Head, seed: int) -> None:
    """Let a head start to answer requests."""
    assert head.stdin
    head.stdin.write(json.dumps({"count": COUNT, "seed": seed, "deaths": 0}) + "\n")
    head.stdin.flush()


async def said(head: Head) -> str:
    assert head.stdout
    text = (await asyncio.to_thread(head.stdout.readline)).strip()
    assert text, "the head has ended"
    return text


async def answered(head: Head) -> Any:
    """Return the answers of a head that has been asked; it must have lost no worker."""
    assert await said(head) == "running"
    result = json.loads(await said(head))
    assert result["deaths"] == 0
    (texts,) = result["answers"]
    return texts


def living_actors() -> dict[str, set[str]]:
    """Return Ray's living actors by the job of the program that created them."""
    from ray._private.state import actors

    jobs: dict[str, set[str]] = {}
    for name, actor in actors().items():
        if actor["State"] == "ALIVE":
            jobs.setdefault(str(actor["JobID"]), set()).add(name)
    return jobs


async def test_heads_on_one_cluster_have_nothing_of_each_other(cluster: Any, checkpoint: Path) -> None:
    """Heads on one cluster do not affect each other. A second head starts while the first answers; both
    answer; then one is stopped and another is killed. The first head keeps its actors and workers, and all
    texts are those of a single local worker."""
    import ray

    cluster.add_node(num_cpus=6, resources={"head": 6})
    async with serving(checkpoint) as llm:
        expected = [json.loads(json.dumps(await answers(llm, make_requests(COUNT, n)))) for n in range(2)]
    ray.init(address=cluster.address, logging_level="warning")
    try:
        with head(checkpoint, cluster) as first:
            assert await said(first) == "ready"
            ((own, kept),) = living_actors().items()
            assert len(kept) == 2, "one for each half of its pair"
            for end in ("stopped", "killed"):
                ask(first, 0)
                with head(checkpoint, cluster) as second:
                    assert await said(second) == "ready"
                    assert await answered(first) == expected[0], "while another head starts"
                    ask(first, 0)
                    ask(second, 1)
                    assert await answered(second) == expected[1]
                    assert await answered(first) == expected[0]
                    (other,) = living_actors().keys() - {own}
                    assert len(living_actors()[other]) == 2
                    assert living_actors()[own] == kept
                    ask(first, 0)
                    assert second.stdin
                    if end == "stopped":
                        second.stdin.close()
                        assert await asyncio.to_thread(second.wait, 60) == 0
                    else:
                        second.kill()
                    await until(lambda: other not in living_actors())  # noqa: B023
                    assert await answered(first) == expected[0], f"while another head is {end}"
                assert living_actors() == {own: kept}
    finally:
        ray.shutdown()


async def test_servers_of_one_program_share_its_connection_to_ray(cluster: Any, checkpoint: Path) -> None:
    """Servers of one program share its connection to Ray. When the one that connected ends, the others keep
    their actors."""
    import ray

    cluster.add_node(num_cpus=4, resources={"program": 4})
    settings = {"launcher": "ray", "ray_address": cluster.address, "ray_resources": ("program=1",)}
    requests = make_requests(COUNT, 3)
    async with AsyncExitStack() as one, AsyncExitStack() as other:
        first = await one.enter_async_context(serving(checkpoint, **settings))
        second = await other.enter_async_context(serving(checkpoint, **settings))
        expected = await answers(first, requests)
        assert await answers(second, requests) == expected
        await one.aclose()
        assert await answers(second, requests) == expected
        assert fleet(second).supervisor.deaths == 0
        assert ray.is_initialized()
    assert not ray.is_initialized()
