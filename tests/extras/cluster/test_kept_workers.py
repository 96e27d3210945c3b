"""Workers that are retained for the next head, with leases, epochs and slots, over real TCP with keys. The
workers are fakes, whose token number n is n."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from streamserve.extras.cluster.hosted import Files, files_of
from streamserve.extras.cluster.placement import AgentCandidate, choose, without_kept
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.curve import parse_endpoint
from tests.extras.cluster.asking import TOKENS, ask, ask_many, until
from tests.extras.cluster.fakes import Cluster, cluster, new_pair


async def ready(made: Cluster) -> None:
    await until(lambda: all(worker.ready for worker in made.runtime.fleet.workers.values()))


def point(first: Cluster, second: Cluster) -> None:
    """Connect the first head's machine to the second head, as after a change of an address."""
    link = first.agents[0].link
    link.target = parse_endpoint(second.launcher.endpoint).port
    link.break_connections()


async def test_a_worker_leaves_before_its_lease_ends_and_serves_again() -> None:
    async with cluster(lease=2.0) as made:
        only = await made.join("a", keep=30.0)
        await ready(made)
        tasks = await ask_many(made, 4)
        only.link.cut()
        started = time.monotonic()
        await until(lambda: not only.agent.membership.joined)
        assert time.monotonic() - started < 2.0
        await until(lambda: made.runtime.fleet.supervisor.deaths == 1)
        only.link.restore()
        assert await asyncio.gather(*tasks) == [list(range(TOKENS))] * 4
        assert len(only.workers) == 1, "the same process"
        assert only.workers[0].adopted
        assert only.workers[0].adopted.worker == "unified-0/2"
        assert only.workers[0].closed > started + 2.0, "a lease after the previous lease ended"
        assert made.runtime.fleet.incidents().adopted == 1


async def test_half_of_a_pair_that_does_not_leave_in_time_is_killed() -> None:
    """Half of a pair that does not leave in time is killed, because it may write into another worker's
    memory."""
    async with cluster(lease=1.0, role="decode") as made:
        only = await made.join("a", keep=30.0)
        await ready(made)
        only.workers[0].leaves_after = 5.0
        only.link.cut()
        cut = time.monotonic()
        await until(lambda: only.workers[0].ended.is_set())
        assert time.monotonic() - cut < 2.0, "another lease later the head uses its blocks again"
        only.link.restore()
        await until(lambda: len(only.workers) == 2)
        await ready(made)
        assert await ask(made, "x", 5) == list(range(5))
        assert made.runtime.fleet.incidents().adopted == 0


async def test_a_worker_that_writes_to_no_other_may_take_a_step_to_leave() -> None:
    async with cluster(lease=1.0) as made:
        only = await made.join("a", keep=30.0)
        await ready(made)
        only.workers[0].leaves_after = 3.0
        only.link.cut()
        await until(lambda: made.runtime.fleet.supervisor.deaths == 1)
        only.link.restore()
        await until(lambda: only.agent.joined_heads == 2)
        assert not only.workers[0].adopted
        await ready(made)
        assert only.workers[0].adopted
        assert len(only.workers) == 1
        assert await ask(made, "x", 5) == list(range(5))


async def test_of_two_heads_at_once_the_later_one_has_the_workers() -> None:
    """Of two heads at a time, the later one has the workers. The first head still runs, but gets nothing: its
    requests wait, and its machine does not return."""
    pair = new_pair()
    async with cluster(epoch=5, lease=1.0, pair=pair) as first, cluster(epoch=6, pair=pair) as second:
        only = await first.join("a", keep=30.0)
        await ready(first)
        tasks = await ask_many(first, 2)
        point(first, second)
        await ready(second)
        assert await ask(second, "r0", 5) == list(range(5))
        assert len(only.workers) == 1
        assert only.workers[0].adopted
        assert only.agent.joined_heads == 2
        await until(lambda: first.runtime.fleet.supervisor.deaths == 1)
        had = [len(request.outputs[0]) for request in first.runtime.fleet.requests.values()]
        point(first, first)
        challenged = first.launcher.registry.challenged
        await until(lambda: first.launcher.registry.challenged > challenged)
        await asyncio.sleep(0.3)
        assert only.agent.joined_heads == 2
        assert not first.launcher.registry.agents
        assert [len(request.outputs[0]) for request in first.runtime.fleet.requests.values()] == had
        assert not any(task.done() for task in tasks)
        point(first, second)
        await until(lambda: only.agent.joined_heads == 3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("moment", ["before it has left", "before it serves"])
async def test_a_kept_worker_that_ends_while_it_is_adopted_is_replaced(moment: str) -> None:
    """A retained worker that ends while it is adopted is replaced at once. The head counts no loss, since it
    would give up a worker whose first start fails."""
    pair = new_pair()
    async with cluster(epoch=5, lease=1.0, pair=pair) as first, cluster(epoch=6, pair=pair) as second:
        only = await first.join("a", keep=30.0)
        await ready(first)
        kept = only.workers[0]
        if moment == "before it has left":
            kept.leaves_after = 30.0
        else:
            kept.adopts_after = 30.0
        point(first, second)
        await until(lambda: only.agent.joined_heads == 2 and not only.agent.membership.machine.kept)
        if moment == "before it serves":
            await until(lambda: kept.adopted is not None)
        kept.kill()
        await ready(second)
        assert await ask(second, "r0", 5) == list(range(5))
        assert len(only.workers) == 2
        assert second.runtime.fleet.supervisor.deaths == 0
        assert second.runtime.fleet.incidents().adopted == 0


async def test_the_third_head_gets_a_worker_that_the_second_one_was_adopting() -> None:
    pair = new_pair()
    async with (
        cluster(epoch=5, lease=1.0, pair=pair) as first,
        cluster(epoch=6, lease=1.0, pair=pair) as second,
        cluster(epoch=7, lease=1.0, pair=pair) as third,
    ):
        only = await first.join("a", keep=30.0)
        await ready(first)
        only.workers[0].adopts_after = 1.0
        point(first, second)
        await until(lambda: only.workers[0].adopted is not None)
        only.workers[0].adopted = None
        point(first, third)
        await ready(third)
        assert await ask(third, "r0", 5) == list(range(5))
        assert len(only.workers) == 1
        assert only.agent.joined_heads == 3
        assert third.runtime.fleet.incidents().adopted == 1
        assert second.runtime.fleet.incidents().adopted == 0


async def test_what_one_head_asked_for_is_not_started_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that one head asked for are not started for the next: the files of a model can be slow to list,
    and both heads ask for a worker of the same name."""
    release = threading.Event()

    def slow_files(model: ModelConfig) -> Files:
        release.wait(30)
        return files_of(model)

    monkeypatch.setattr("streamserve.extras.cluster.worker_host.files_of", slow_files)
    pair = new_pair()
    async with cluster(epoch=5, lease=1.0, pair=pair) as first, cluster(epoch=6, pair=pair) as second:
        only = await first.join("a", keep=30.0)
        await until(lambda: "unified-0/1" in first.launcher.remote)
        point(first, second)
        await until(lambda: "unified-0/1" in second.launcher.remote)
        release.set()
        await ready(second)
        assert await ask(second, "r0", 5) == list(range(5))
        assert len(only.workers) == 1


async def test_kept_workers_end_after_their_time_and_with_their_agent() -> None:
    async with cluster(workers=2, lease=1.0) as made:
        first = await made.join("a", keep=0.5)
        second = await made.join("b", keep=30.0)
        await ready(made)
        first.link.cut()
        second.link.cut()
        await until(lambda: first.workers[0].ended.is_set())
        await until(lambda: not second.agent.membership.joined)
        assert not second.workers[0].ended.is_set()
        assert second.agent.membership.machine.kept
        assert not first.agent.membership.machine.kept
        second.agent.stop()
        await second.running
        assert second.workers[0].ended.is_set()


@pytest.mark.parametrize("change", ["settings", "files"])
async def test_a_worker_of_another_model_is_not_adopted(tmp_path: Path, change: str) -> None:
    pair, model = new_pair(), tmp_path / "model"
    model.write_text("weights")
    async with cluster(epoch=5, lease=1.0, pair=pair, path=str(model)) as first:
        only = await first.join("a", keep=30.0)
        await ready(first)
        if change == "files":
            model.write_text("other weights")
        path = str(model) if change == "files" else ""
        async with cluster(epoch=6, pair=pair, path=path) as second:
            point(first, second)
            await ready(second)
            assert len(only.workers) == 2
            assert only.workers[0].ended.is_set(), "its slot was needed"
            assert await ask(second, "x", 5) == list(range(5))
            assert second.runtime.fleet.incidents().adopted == 0


def test_files_of_a_model_are_known_by_size_time_and_inode(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    before = files_of(ModelConfig(path=str(tmp_path)))
    assert before == files_of(ModelConfig(path=str(tmp_path)))
    (tmp_path / "b").write_text("2")
    assert before != files_of(ModelConfig(path=str(tmp_path)))
    assert files_of(ModelConfig(path=str(tmp_path / "missing"))) == ()


def test_workers_go_where_one_like_them_was_kept() -> None:
    places = [AgentCandidate("a", 1, [], ["decode-0"]), AgentCandidate("b", 1, [], ["prefill-0"])]
    assert choose("prefill-0", places) == 1
    assert choose("decode-0", places) == 0
    assert choose("prefill-1", places[:1], ["decode-0", "prefill-1"]) is None, (
        "decode-0 waits for its own slot"
    )
    assert choose("prefill-1", places[:1], ["prefill-1"]) == 0
    two = AgentCandidate("c", 2, [], ["unified-0"])
    assert choose("prefill-0", [two], ["unified-0", "prefill-0"]) == 0, "there is another slot"
    assert choose("unified-7", [AgentCandidate("d", 2, []), two]) == 1
    assert without_kept(["unified-0", "unified-1"], "unified-1") == ["unified-0"]
    assert without_kept(["unified-0", "decode-1"], "unified-4") == ["decode-1"]
    assert without_kept(["decode-1"], "unified-4") == ["decode-1"]
