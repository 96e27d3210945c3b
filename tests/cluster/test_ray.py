"""Workers that Ray places on two nodes: the text of one local worker, also when actors and nodes die."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamserve.cluster.ray_launcher import RayLauncher, cpus_of_each, groups
from streamserve.llm.async_llm import AsyncLLM
from tests.checkpoints import make_checkpoint
from tests.test_pairs import answers, fleet, make_requests, serving, until, wait_until_idle

COUNT = 12


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
    """The agents that have joined, by the worker that each was made for, with the identity of its node."""
    agents = launcher(llm)._join.registry.agents.values()
    return {agent.name.rpartition(".")[2]: agent.name for agent in agents}


async def test_ray_places_workers(cluster: Any, checkpoint: Path) -> None:
    """An actor dies, then the node with all workers: each costs time, never text."""
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

        actors, deaths = launcher(llm)._actors, 0
        for end in ("actor", "node"):
            asked = asyncio.create_task(answers(llm, make_requests(COUNT, 3)))
            await until(lambda: any(any(r.outputs.values()) for r in fleet(llm).requests.values()))
            if end == "actor":
                ray.kill(actors["decode-0"])
            else:
                await asyncio.to_thread(cluster.remove_node, _used(nodes))
            assert await asked == expected, end
            await until(lambda: fleet(llm).supervisor.deaths > deaths)  # noqa: B023
            await until(lambda: all(worker.ready for worker in fleet(llm).workers.values()))
            deaths = fleet(llm).supervisor.deaths
        assert await answers(llm, make_requests(COUNT, 3)) == expected
    assert not ray.is_initialized()


def _used(nodes: list[Any]) -> Any:
    """The node whose places are taken."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    (node,) = (node for node in nodes if not free[node.node_id].get("place"))
    return node
