"""Workers on joining machines give the same text through every fault of the link and the machine, over real
TCP with keys. The workers are fakes, whose token number n is n."""

import asyncio
import time
from collections.abc import Callable

import msgspec
import pytest
import zmq.asyncio

from streamserve.extras.cluster.listener import ClusterListener
from streamserve.extras.cluster.registry import JOIN_BURST
from streamserve.fleet.view import router_view
from streamserve.protocol import cluster as messages
from streamserve.protocol.cluster import CLUSTER_VERSION, ClusterRefused, Knock, decode_from_head, encode
from streamserve.protocol.curve import parse_endpoint
from streamserve.protocol.errors import RequestError
from tests.conftest import Scale
from tests.extras.cluster.asking import TOKENS, ask, ask_many, peer, until
from tests.extras.cluster.fakes import cluster, new_pair
from tests.fuzz.zmtp import INVALID_OPENINGS, handshakes


async def test_workers_start_on_machines_that_join_and_stop_with_the_head() -> None:
    async with cluster(workers=2) as made:
        first = await made.join("a")
        second = await made.join("b")
        await until(lambda: all(w.ready for w in made.runtime.fleet.workers.values()))
        assert len(first.workers) == len(second.workers) == 1
        assert await ask(made, "x", 20) == list(range(20))
        assert first.workers[0].until is not None
        assert first.workers[0].until > time.monotonic()
        await made.runtime.close()
        assert first.workers[0].ended.is_set()
        assert second.workers[0].ended.is_set()


async def test_a_worker_that_a_machine_cannot_start_is_started_again() -> None:
    async with cluster() as made:
        only = await made.join("a")
        await until(lambda: made.runtime.fleet.health()[0])
        only.failing = 2
        only.workers[0].kill()
        await until(lambda: len(only.workers) == 2)
        await until(lambda: made.runtime.fleet.health()[0])
        assert await ask(made, "x", 5) == list(range(5))
        assert made.runtime.fleet.supervisor.deaths == 3


async def test_the_view_names_the_machine_of_each_worker() -> None:
    async with cluster(workers=3) as made:
        runtime = made.runtime
        await until(lambda: len(runtime.waiting()) == 3)
        assert not runtime.machines()
        await made.join("a", slots=2)
        await until(lambda: len(runtime.waiting()) == 1)
        await made.join("a")
        await until(lambda: all(w.ready for w in runtime.fleet.workers.values()))
        assert not runtime.waiting()
        now = time.monotonic()
        view = router_view(runtime.fleet, "random", runtime.machines(), now)
        slots = {machine.name: (machine.slots, len(machine.workers)) for machine in view.machines}
        assert slots == {"a": (2, 2), "a#2": (1, 1)}, "two agents with the same name are distinguished"
        assert {worker.host for worker in view.workers} == {"a", "a#2"}
        assert all(0 < machine.joined_seconds < 60 and machine.silence < 10 for machine in view.machines)


async def test_workers_are_added_and_removed_on_machines() -> None:
    async with cluster(workers=1, bound=3) as made:
        runtime, workers = made.runtime, made.runtime.fleet.workers
        await made.join("a")
        await until(lambda: runtime.fleet.health()[0])
        tasks = await ask_many(made)
        await runtime.add_workers(("unified-1", "unified-2"))
        await until(lambda: runtime.waiting() == ["unified-1", "unified-2"])
        await runtime.remove_workers(("unified-2",), 0.0)
        await until(lambda: runtime.waiting() == ["unified-1"])
        second = await made.join("b", slots=2)
        await until(lambda: workers["unified-1"].ready is not None)
        with pytest.raises(RequestError, match="there are unified-0, unified-1"):
            await runtime.remove_workers(("unified-2",), 0.0)
        moved = await runtime.remove_workers(("unified-0",), 0.0)
        assert moved == 0, "they continue on the other machine"
        assert runtime.fleet.scaling.moved == 16
        await until(lambda: made.agents[0].workers[0].ended.is_set())
        assert await asyncio.gather(*tasks) == [list(range(TOKENS))] * 16
        await runtime.add_workers(("unified-0",))
        await until(lambda: workers["unified-0"].ready is not None)
        assert workers["unified-0"].incarnation == 2
        assert len(second.workers) + len(made.agents[0].workers) == 3
        assert runtime.fleet.supervisor.deaths == 0


FAULTS = {
    "delay of 200 ms": 0.0,
    "broken connections": 0.0,
    "stall within the lease": 0.0,
    "cut beyond the lease": 1.0,
    "stall beyond the lease": 1.0,
    "killed worker": 0.0,
    "killed machine": 1.0,
}
"""Faults, and the minimum number of leases that recovery takes."""


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_costs_time_never_text(fault: str, record: Callable[..., None]) -> None:
    lease = 1.0
    async with cluster(workers=2, lease=lease) as made:
        victim = await made.join("a")
        await made.join("b")
        await until(lambda: all(w.ready for w in made.runtime.fleet.workers.values()))
        tasks = await ask_many(made)
        started = time.monotonic()
        session = victim.agent.membership.session
        assert session
        match fault:
            case "delay of 200 ms":
                victim.link.delay = 0.2
            case "broken connections":
                for _ in range(3):
                    victim.link.break_connections()
                    await asyncio.sleep(0.1)
            case "stall within the lease":
                victim.link.stall()
                await asyncio.sleep(lease / 2)
                victim.link.restore()
            case "cut beyond the lease" | "stall beyond the lease":
                (victim.link.cut if "cut" in fault else victim.link.stall)()
                await until(lambda: victim.workers[0].ended.is_set())
                ended = time.monotonic() - started
                assert ended <= lease + 0.3, "the machine ends its workers without the head"
            case "killed worker":
                victim.workers[0].kill()
            case "killed machine":
                victim.link.cut()
                victim.link.break_connections()
                victim.running.cancel()
        assert await asyncio.gather(*tasks) == [list(range(TOKENS))] * 16
        recovery = time.monotonic() - started
        losses = made.runtime.fleet.supervisor.deaths
        assert losses == (fault in ("cut beyond the lease", "stall beyond the lease") or "killed" in fault)
        assert recovery >= FAULTS[fault] * lease - 0.1
        if fault == "broken connections":
            assert victim.link.connections > 1, "it has connected again"
            assert victim.agent.membership.session is session, "within the same session"
        record(fault=fault, seconds=round(recovery, 2), losses=losses)


async def test_a_machine_comes_back_after_its_lease_and_serves_again() -> None:
    async with cluster(lease=1.0) as made:
        only = await made.join("a")
        await until(lambda: made.runtime.fleet.health()[0])
        tasks = await ask_many(made, 4)
        only.link.cut()
        await until(lambda: made.runtime.fleet.supervisor.deaths == 1)
        only.link.restore()
        assert await asyncio.gather(*tasks) == [list(range(TOKENS))] * 4
        assert only.agent.joined_heads == 2
        assert len(only.workers) == 2
        assert only.workers[0].ended.is_set()


async def test_a_lost_worker_is_not_dead_before_as_much_time_as_its_lease() -> None:
    """A lost worker counts as dead only after the duration of its lease: its machine, which the head cannot
    reach, may write KV until then."""
    async with cluster(lease=1.0) as made:
        only = await made.join("a")
        await until(lambda: made.runtime.fleet.health()[0])
        remote = made.launcher.remote["unified-0/1"]
        only.link.cut()
        await until(lambda: remote.over)
        lost_at = time.monotonic()
        await until(lambda: only.workers[0].ended.is_set() or remote.is_dead)
        assert not remote.is_dead, "the agent ends it first"
        await until(lambda: remote.is_dead)
        assert time.monotonic() - lost_at == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("epoch", [4, 6])
async def test_after_a_head_only_one_of_a_higher_epoch_is_joined(epoch: int) -> None:
    pair = new_pair()
    async with cluster(epoch=5, pair=pair) as first:
        only = await first.join("a")
        await until(lambda: first.runtime.fleet.health()[0])
        endpoint = first.launcher.endpoint
        await first.runtime.close()
        assert only.workers[0].ended.is_set()
        async with cluster(endpoint=endpoint, epoch=epoch, pair=pair) as second:
            if epoch > 5:
                await until(lambda: second.runtime.fleet.health()[0])
                assert await ask(second, "x", 5) == list(range(5))
                assert only.agent.joined_heads == 2
            else:
                await until(lambda: second.launcher.registry.challenged > 0)
                await asyncio.sleep(0.2)
                assert only.agent.joined_heads == 1
                assert not second.launcher.registry.agents


async def test_keys_that_are_not_allowed_are_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster() as made:
        stranger = new_pair()
        for name in ("one", "two", "three"):
            await made.join(name, stranger)
        await until(lambda: made.launcher.listener.handshakes_failed >= 3)
        # Both ends notice it independently, in either order.
        await until(lambda: "is not allowed" in caplog.text and "refuses this machine's key" in caplog.text)
        assert caplog.text.count("refused a connection: its key") == 1
        assert caplog.text.count("refused a connection: a connection used a key that is not allowed") == 1
        assert not made.launcher.registry.agents
        await made.join("a")
        await until(lambda: made.runtime.fleet.health()[0])
        assert await ask(made, "x", 5) == list(range(5))


async def test_an_address_in_use_is_named_once() -> None:
    async with cluster() as made:
        endpoint = made.launcher.listener.address
        with pytest.raises(OSError, match="Address already in use") as raised:
            ClusterListener(endpoint, new_pair(), {}, 1.0)
        assert str(raised.value) == f"cannot listen at {endpoint}: Address already in use"


async def test_hostile_holders_of_a_key_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Hostile holders of a key are refused: after undecodable, large, unexpected and old messages, the head
    still works."""
    bodies = [
        (b"", "unreadable"), (b"\xc1", "unreadable"), (bytes(5000), "size"),
        (encode(Knock(CLUSTER_VERSION, "0.0.0")), "version"),
        (encode(messages.Register(bytes(16), messages.Machine("x", "y", "z"))), "challenge"),
        (encode(messages.Packet(1, b"x")), "connection"),
        (encode(messages.Resume(bytes(16))), "session"),
        (msgspec.msgpack.encode({"type": "Knock", "version": -1, "release": "x" * 100}), "unreadable"),
    ]  # fmt: skip
    async with cluster() as made:
        await made.join("a")
        await until(lambda: made.runtime.fleet.health()[0])
        context = zmq.asyncio.Context()
        socket = peer(made, context)
        try:
            for body, reason in bodies:
                await socket.send(body)
                answer = decode_from_head(await asyncio.wait_for(socket.recv(), 5))
                assert isinstance(answer, ClusterRefused)
                assert answer.reason == reason, body
            await socket.send_multipart([b"a", b"b"])
            answer = decode_from_head(await asyncio.wait_for(socket.recv(), 5))
            assert isinstance(answer, ClusterRefused)
            for _ in range(int(JOIN_BURST) + 200):
                await socket.send(b"\xc1")
            await until(lambda: made.launcher.registry.refused.get("rate", 0) > 0)
            unreadable = "refused a machine that wants to join: DecodeError"
            assert 0 < caplog.text.count(unreadable) < 10, "its log is bounded too"
            assert await ask(made, "x", 5) == list(range(5))
        finally:
            socket.close()
            context.term()


async def test_a_registered_machine_that_sends_nonsense_is_ended() -> None:
    async with cluster() as made:
        bad = await made.join("a")
        await until(lambda: made.runtime.fleet.health()[0])
        await bad.agent._socket.send(b"\xc1")
        await until(lambda: made.runtime.fleet.supervisor.deaths == 1)
        await until(lambda: made.runtime.fleet.health()[0])
        assert bad.agent.joined_heads == 2


async def test_without_a_key_nothing_is_said_beyond_the_handshake(scale: Scale) -> None:
    """Without a key, clients get no reply beyond the handshake: a port scan with openings of other protocols,
    and handshakes without keys, have no effect."""
    async with cluster() as made:
        await made.join("a")
        await until(lambda: made.runtime.fleet.health()[0])
        port = parse_endpoint(made.launcher.endpoint).port
        for opening in [*INVALID_OPENINGS, *handshakes().values()]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(opening)
            await writer.drain()
            said = b""
            try:
                async with asyncio.timeout(0.3):
                    while data := await reader.read(4096):
                        said += data
            except (TimeoutError, OSError):
                pass
            # A ZMTP greeting, which names the mechanism.
            assert said == said[:64]
            assert b"streamserve" not in said
            writer.transport.abort()
        assert made.launcher.listener.handshakes_failed > 0
        assert made.launcher.registry.refused == {}
        assert len(made.launcher.registry.agents) == 1
        assert await ask(made, "x", 5) == list(range(5))


async def test_an_address_in_use_is_an_error_that_names_it() -> None:
    pair = new_pair()
    listener = ClusterListener("tcp://127.0.0.1:0", pair, {}, 1.0)
    try:
        with pytest.raises(OSError, match="cannot listen at tcp://127"):
            ClusterListener(listener.address, pair, {}, 1.0)
    finally:
        listener.close()
