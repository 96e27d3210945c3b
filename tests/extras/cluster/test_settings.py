"""Settings of joining machines, the lease of a process, times of another machine's clock, and the placement
of workers."""

import dataclasses
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.extras.cluster.launchers import next_epoch
from streamserve.extras.cluster.placement import AgentCandidate, choose
from streamserve.protocol.lease import LEASE, Lease
from streamserve.protocol.messages import Edit, Submit, Traced, Work
from streamserve.protocol.sampling import SamplingParams
from streamserve.protocol.transfers import Join
from streamserve.settings.cluster import check_visible_keys, resolve_join
from streamserve.settings.options import SECRETS, SettingsError
from streamserve.settings.resolve import resolve
from streamserve.settings.server_config import ServerConfig
from streamserve.workers.server_clock import to_local, to_server
from tests.extras.cluster.fakes import key_file


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"launcher": "join"}, "join_key is required: create one with `streamserve keys new"),
        ({"launcher": "join", "join_key": "/nowhere"}, "cannot be read"),
        ({"launcher": "join", "join_key": "KEY", "listen": "7800"}, "is not tcp://HOST:PORT"),
        ({"launcher": "join", "join_key": "KEY", "join_clients": "/nowhere"}, "cannot be read"),
        (
            {"launcher": "join", "join_key": "KEY", "listen": f"tcp://{'ab' * 32}@h:1"},
            "must not contain a key",
        ),
        ({"listen": "tcp://0.0.0.0:7800"}, "give launcher = 'join'"),
        ({"join_lease": 2.0}, "give launcher = 'join'"),
        ({"launcher": "ray", "ray_resources": ("fast",)}, "must be NAME=AMOUNT"),
        ({"launcher": "ray", "ray_resources": ("CPU=1",)}, "must be NAME=AMOUNT"),
        ({"launcher": "ray", "ray_address": "ray://10.0.0.1:10001"}, "must be auto or HOST:PORT"),
        ({"ray_resources": ("fast=1",)}, "give launcher = 'ray'"),
        ({"launcher": "slurm"}, "must be one of local, join, ray"),
    ],
)
def test_contradictory_settings_are_refused(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    key = key_file(tmp_path)
    given = {name: str(key) if value == "KEY" else value for name, value in settings.items()}
    with pytest.raises(SettingsError, match=message):
        resolve("embedded", given)


def test_keys_of_machines_without_a_key_of_the_server_are_refused(tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    clients.write_text(f"{'ab' * 32} node-1\n")
    with pytest.raises(SettingsError, match="join_clients: has no effect without join_key"):
        resolve("embedded", {"launcher": "ray", "join_clients": str(clients)})


@pytest.mark.parametrize("name", SECRETS)
def test_keys_on_a_command_line_that_ray_shows_are_refused(name: str) -> None:
    server = ServerConfig(launcher="ray")
    check_visible_keys(server, {"port": 9000, f"{name}_file": "keys"})
    check_visible_keys(ServerConfig(), {name: ["secret"]})
    with pytest.raises(SettingsError, match=f"{name}_file, or the variable STREAMSERVE_{name.upper()}"):
        check_visible_keys(server, {name: ["secret"]})


def test_without_server_key_the_key_file_is_that_of_the_server(tmp_path: Path) -> None:
    key = str(key_file(tmp_path))
    settings = resolve_join("tcp://10.0.0.1:7800", key, None, None, 2, None)
    assert settings.head_key == settings.own.public
    assert settings.machine.slots == 2
    other = resolve_join(f"tcp://{'ab' * 32}@10.0.0.1:7800", key, "node-7", None, 1, None)
    assert other.head_key.hex() == "ab" * 32
    assert other.machine.name == "node-7"
    for join, file, message in (
        ("tcp://10.0.0.1:7800", None, "--key is required"),
        ("10.0.0.1:7800", key, "is not tcp://HOST:PORT"),
        ("tcp://10.0.0.1:0", key, "has no port"),
    ):
        with pytest.raises(SettingsError, match=message):
            resolve_join(join, file, None, None, 1, None)


def test_epochs_rise_with_each_head_whatever_the_clock(tmp_path: Path) -> None:
    key = key_file(tmp_path)
    epochs = [next_epoch(key, clock) for clock in (1000.0, 1000.0, 5.0, 2000.0)]
    assert epochs == [1_000_000, 1_000_001, 1_000_002, 2_000_000]
    (tmp_path / "cluster.key.epoch").write_text("nonsense")
    assert next_epoch(key, 3.0) == 3000


def test_a_lease_is_read_in_any_pieces() -> None:
    rng = random.Random(1)
    data = b"".join(LEASE.pack(until) for until in (5.0, 9.0, 7.0))
    for _ in range(20):
        lease, rest = Lease(), data
        assert not lease.is_over(1e9)
        while rest:
            size = rng.randint(1, 20)
            lease.read(rest[:size])
            rest = rest[size:]
        assert lease.until == 7.0
        assert lease.is_over(7.1)
        assert not lease.is_over(6.9)


def test_times_are_those_of_each_sides_clock() -> None:
    submit = Submit("r", [1], SamplingParams(), attempt=1, outputs={0: []}, arrival=100.0, began={0: 101.0})
    assert to_local(submit, 30.0).arrival == 70.0
    assert to_local(submit, 30.0).began == {0: 71.0}
    assert to_local(submit, 0.0) is submit
    assert to_local(Edit("r", 1, 1, 0, [], arrival=50.0), -5.0).arrival == 55.0
    assert to_local(Join("r", 1, "id", {0: []}, {0: 9.0}), 4.0).began == {0: 5.0}
    traced = to_server(Traced([Work("step", "", 70.0)]), 30.0)
    assert isinstance(traced, Traced)
    assert traced.work[0].at == 100.0


def test_the_halves_of_a_pair_are_started_on_one_machine_others_where_most_is_free() -> None:
    places = [AgentCandidate("a", 1, []), AgentCandidate("b", 2, []), AgentCandidate("c", 2, ["prefill-1"])]
    assert choose("prefill-0", places) == 1
    assert choose("decode-1", places) == 2
    assert choose("unified-0", [AgentCandidate("a", 1, ["unified-1"]), AgentCandidate("b", 1, [])]) == 1
    assert choose("unified-0", [dataclasses.replace(places[0], workers=["x"])]) is None


def test_an_agent_that_was_made_for_a_worker_runs_it() -> None:
    decode, prefill = (AgentCandidate("vm", 1, [], made_for=name) for name in ("decode-0", "prefill-0"))
    both = ["decode-0", "prefill-0"]
    assert choose("prefill-0", [decode, prefill], both) == 1
    assert choose("decode-0", [decode, prefill], both) == 0
    assert choose("prefill-0", [decode], both) is None, "decode-0 waits for this slot"
    assert choose("prefill-0", [decode], ["prefill-0"]) == 0, "decode-0 runs elsewhere, or is gone"
    assert choose("prefill-0", [dataclasses.replace(decode, slots=2)], both) == 0, "there is another slot"


@given(data=st.data())
def test_every_worker_gets_an_agent_and_none_that_another_waits_for(data: st.DataObject) -> None:
    """Every worker gets an agent, and none that another worker waits for. Agents join in any order, workers
    ask in any order, and some agents were made for workers that no longer exist."""
    waiting = [f"{role}-{n}" for role in ("prefill", "decode") for n in range(data.draw(st.integers(1, 3)))]
    spare = data.draw(st.integers(0, len(waiting)))
    made_for = [*waiting[spare:], *(f"unified-{number}" for number in range(spare))]
    machines = st.sampled_from(["a", "b", "c"])
    order = data.draw(st.permutations(made_for))
    coming, places = (
        [AgentCandidate(data.draw(machines), 1, [], made_for=name) for name in order],
        list[AgentCandidate](),
    )
    waiting, ran = list(data.draw(st.permutations(waiting))), dict[str, str]()
    while coming:
        places.append(coming.pop())
        for worker in list(waiting):
            chosen = choose(worker, places, waiting)
            if chosen is not None:
                ran[worker] = places[chosen].made_for
                assert ran[worker] not in {*waiting} - {worker}
                places[chosen] = dataclasses.replace(places[chosen], workers=[worker])
                waiting.remove(worker)
    assert waiting == []
    assert spare or all(worker == own for worker, own in ran.items())
