"""Workers are added and removed at random moments while requests arrive: every text is right, no request is
lost, and the requests of a removed worker continue elsewhere."""

import random
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import AddWorkers, ClientEdit, Open, RemoveWorkers
from streamserve.fleet.worker_state import Topology, mixed, pairs, pools, unified
from streamserve.protocol.errors import RequestError
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import expected, model_info
from tests.simulate.answering import ENGINE, assert_all_answered, texts

TOPOLOGIES = (unified(1), pairs(1), pools(1, 2), mixed(1, 1, 1), mixed(1, 2, 1))
BOUND = 7


class Scaled:
    """A simulated server under load whose workers change at random, by `seed`."""

    def __init__(self, seed: int, topology: Topology, wire: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.roles = [
            *(["unified"] if topology.unified else []),
            *(["pair", "prefill", "decode"] if topology.prefill else []),
        ]
        self.refused = 0
        self.simulation = Simulation(
            FleetConfig(topology=topology, max_attempts=20, max_workers=BOUND),
            WorkerSpec(
                ENGINE, model_info(96), lambda tokens, context: 0.01 + tokens * 0.002, wire_seconds=wire
            ),
        )
        self.scaling = self.simulation.fleet.scaling
        self.opened: list[Open] = []
        self.streams: list[tuple[Open, list[int]]] = []

    def load(self, requests: int = 30, streams: int = 3) -> None:
        """Let requests arrive during the first five seconds, and prompt streams that take three seconds."""
        for number in range(requests):
            prompt = [self.rng.randrange(90) for _ in range(self.rng.randint(1, 40))]
            params = SamplingParams(
                n=self.rng.choice((1, 1, 2)), seed=number, max_tokens=self.rng.randint(1, 40)
            )
            self.opened.append(Open(f"r{number}", prompt, params))
            self.simulation.at(self.rng.uniform(0, 5), self.opened[-1])
        for number in range(streams):
            first, rest = ([self.rng.randrange(90) for _ in range(20)] for _ in range(2))
            opened = Open(f"s{number}", first, SamplingParams(seed=number, max_tokens=8), open=True)
            since = self.rng.uniform(1, 2)
            self.simulation.at(since, opened)
            self.simulation.at(since + 3, ClientEdit(opened.request, 1, len(first), rest, finish=True))
            self.streams.append((opened, first + rest))

    def add(self, role: str, count: int = 1) -> None:
        names = self.scaling.free_names(role, count)
        try:
            self.scaling.after_adding(names)
        except RequestError:
            self.refused += 1
        else:
            self.simulation._handle(AddWorkers(names))

    def remove(self, name: str, within: float) -> None:
        try:
            names = self.scaling.named(name)
            self.scaling.after_removing(names)
        except RequestError:
            self.refused += 1
        else:
            self.simulation._handle(RemoveWorkers(names, within))

    def change(self) -> None:
        """Add or remove a random worker."""
        if self.rng.random() < 0.5:
            self.add(self.rng.choice(self.roles))
            return
        name = self.rng.choice([*self.simulation.fleet.workers])
        if "pair" in self.roles and "unified" not in name and self.rng.random() < 0.5:
            name = f"pair-{name.rpartition('-')[2]}"
        self.remove(name, self.rng.choice((0.0, 0.2, inf)))

    def kill(self) -> None:
        self.simulation._die(self.simulation.workers[self.rng.choice([*self.simulation.workers])])

    def run(self) -> None:
        """Run to the end; assert that every client has its text, and that nothing remains of removed
        workers."""
        self.simulation.clock.at(0.0, self.simulation.schedule_ticks)
        received = self.simulation.run()
        assert_all_answered(self.simulation, self.opened, received)
        tokens = texts(received)
        for opened, prompt in self.streams:
            assert tokens[opened.request, 0] == expected(prompt, opened.params, 0, 96)
        fleet = self.simulation.fleet
        assert set(self.simulation.workers) == set(fleet.workers) == set(fleet.availability.topology.names)
        assert not any(worker.leaving for worker in fleet.workers.values())
        assert len(fleet.workers) <= BOUND


wires = st.sampled_from((0.0, 0.003, 0.1))


@given(seed=st.integers(0, 2**32), topology=st.sampled_from(TOPOLOGIES), wire=wires, kills=st.integers(0, 2))
@example(2125508084, TOPOLOGIES[2], 0.1, 1)
@example(659086621, TOPOLOGIES[1], 0.0, 2)
@example(1938849020, TOPOLOGIES[3], 0.1, 1)
@example(1306397233, TOPOLOGIES[2], 0.1, 2)
def test_changes_at_random_moments_cost_time_never_text(
    seed: int, topology: Topology, wire: float, kills: int
) -> None:
    """Changes at random moments cost time and never change the text. Examples: halves of different pairs
    leave, and the other halves form a pair; halves leave one by one; suspects are tried on workers that
    leave."""
    scaled = Scaled(seed, topology, wire)
    scaled.load()
    clock, rng = scaled.simulation.clock, scaled.rng
    clock.at(rng.uniform(0.5, 1.5), lambda: scaled.add(scaled.roles[0]))
    for _ in range(8):
        clock.at(rng.uniform(0.5, 6), scaled.change)
    for _ in range(kills):
        clock.at(rng.uniform(1.2, 5), scaled.kill)
    scaled.run()
    assert scaled.scaling.added > 0
    if not kills:
        assert scaled.simulation.deaths == 0


@pytest.mark.parametrize("wire", [0.0, 0.1])
@pytest.mark.parametrize(
    ("topology", "first"), [(unified(1), "unified-0"), (pairs(1), "pair-0"), (mixed(1, 1, 1), "pair-0")]
)
def test_all_workers_of_the_start_are_replaced_under_load(
    topology: Topology, first: str, wire: float
) -> None:
    """All initial workers are replaced under load. They leave when their requests have ended, so nothing is
    computed twice."""
    scaled = Scaled(5, topology, wire)
    scaled.load(streams=0)
    named = scaled.scaling.named(first)
    clock = scaled.simulation.clock
    clock.at(1.0, lambda: scaled.add(scaled.roles[-3] if first == "pair-0" else "unified"))
    clock.at(2.6, lambda: scaled.remove(first, inf))
    scaled.run()
    assert scaled.refused == 0
    assert scaled.scaling.moved == 0
    assert scaled.scaling.removed == len(named) == scaled.scaling.added
    assert scaled.simulation.fleet.workers.keys().isdisjoint(named)
    assert len(scaled.simulation.retired) == scaled.scaling.removed
    for worker in scaled.simulation.retired:
        assert worker.engine.report().steps > 0
    assert all(worker.engine.report().steps for worker in scaled.simulation.workers.values())
    every = [*scaled.simulation.retired, *scaled.simulation.workers.values()]
    generated = sum(worker.engine.report().generation_tokens for worker in every)
    handed_over = sum(opened.params.n for opened in scaled.opened) if first == "pair-0" else 0
    answered = sum(opened.params.n * opened.params.max_tokens for opened in scaled.opened)
    assert answered <= generated <= answered + handed_over


@pytest.mark.parametrize("topology", [unified(2), pairs(2), pools(2, 2)])
def test_requests_of_a_worker_whose_time_is_up_continue_elsewhere(topology: Topology) -> None:
    scaled = Scaled(6, topology, 0.01)
    scaled.load(60)
    scaled.simulation.clock.at(2.5, lambda: scaled.remove(topology.names[0], 0.0))
    scaled.run()
    assert scaled.scaling.moved > 0
    assert scaled.scaling.removed == 1


def test_a_name_that_comes_back_goes_on_with_its_incarnations() -> None:
    scaled = Scaled(7, unified(2))
    scaled.load()
    clock, fleet = scaled.simulation.clock, scaled.simulation.fleet
    clock.at(1.5, lambda: scaled.remove("unified-1", 0.0))
    clock.at(2.0, lambda: scaled.add("unified"))
    scaled.run()
    assert (scaled.scaling.added, scaled.scaling.removed) == (1, 1)
    assert fleet.workers["unified-1"].incarnation == 2
    assert fleet.workers["unified-1"].ready


def refusal(scaled: Scaled, change: str, *names: str) -> RequestError:
    with pytest.raises(RequestError) as error:
        getattr(scaled.scaling, change)(names)
    return error.value


def test_what_cannot_be_changed_is_refused_by_name() -> None:
    scaled = Scaled(8, unified(1))
    assert "no worker, or only one half" in str(refusal(scaled, "after_removing", "unified-0"))
    missing = refusal(scaled, "after_removing", "unified-7")
    assert (missing.status, str(missing)) == (404, "there is no worker 'unified-7'; there are unified-0")
    for name in ("pair-0", "unified-7", "nothing"):
        with pytest.raises(RequestError, match=f"there is no worker '{name}'; there are unified-0") as error:
            scaled.scaling.named(name)
        assert error.value.status == 404
    assert "without stream pairs" in str(refusal(scaled, "after_adding", "prefill-0", "decode-0"))
    many = refusal(scaled, "after_adding", *scaled.scaling.free_names("unified", BOUND))
    assert (many.status, "--max-workers" in str(many)) == (409, True)
    scaled.add("unified")
    loading = refusal(scaled, "after_removing", "unified-0")
    assert (loading.status, "cannot serve (yet)" in str(loading)) == (409, True)
    paired = Scaled(8, pairs(1))
    assert "without unified workers" in str(refusal(paired, "after_adding", "unified-0"))
    assert "one half of pairs" in str(refusal(paired, "after_removing", "decode-0"))


def test_halves_of_the_last_pair_leave_together_and_do_not_come_back_alone() -> None:
    """If both halves of the last pair leave, neither returns alone: one is asked to leave again, at another
    time, but a half could not serve without the other."""
    scaled = Scaled(8, mixed(1, 1, 1))
    scaled.load(requests=60, streams=0)
    clock, there = scaled.simulation.clock, scaled.simulation.fleet.workers
    clock.at(2.0, lambda: scaled.remove("pair-0", inf))
    clock.at(2.001, lambda: scaled.remove("decode-0", 0.0))
    scaled.run()
    assert scaled.refused == 0
    assert set(there) == {"unified-0"}
    alone = refusal(scaled, "after_adding", "decode-0")
    assert (alone.status, "add a pair" in str(alone)) == (409, True)
    assert scaled.scaling.after_adding(("prefill-0", "decode-0")).decode == ("decode-0",)
