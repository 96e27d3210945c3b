"""Rounds: each scenario on every engine, one after the other, with the machine's floor measured alongside."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from benchmarks.engines.peers import http, setup
from benchmarks.engines.peers.adapters import OFFLINE_OF, OURS, OURS_OF, PEERS
from benchmarks.engines.peers.checkpoints import MODELS, ensure, text
from benchmarks.engines.peers.engine import Engine, EngineError, Process
from benchmarks.engines.peers.rounds import MACHINE, append, width_of
from benchmarks.engines.peers.scenarios import HTTP, SCENARIOS, Scenario, floor, work

FIRST = Scenario("first token", new=8, out=1)
FLOOR_WORK = {"name": MACHINE, "known": [], "turns": [[[]]], "out": 3, "streams": 1, "longest": 0}


@dataclass(frozen=True)
class Plan:
    """A measurement plan: the names of the model, peers and scenarios, and the cores and KV memory to use."""

    model: str
    peers: tuple[str, ...]
    scenarios: tuple[str, ...]
    rounds: int
    cores: tuple[int, ...]
    kv_bytes: int
    folder: Path
    records: Path
    paced: bool = False
    """Whether to wait for Enter before every start and every scenario."""


class Slice:
    """A run in which every engine is started once, and the rounds that follow."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model = MODELS[plan.model]
        self.name = time.strftime("%Y%m%d-%H%M%S")
        self.checkpoint = ensure(self.model, plan.folder / "checkpoints" / plan.model)
        self.running: dict[str, Process] = {}
        self.dropped: dict[tuple[str, str], str] = {}

    def pause(self) -> None:
        """Wait for Enter, where other measurements alternate with these on the machine."""
        if self.plan.paced:
            input("Enter: next\n")

    def record(self, round_number: int, scenario: str, engine: str, **rest: Any) -> None:
        """Add a line to the records."""
        line = {"slice": self.name, "round": round_number, "scenario": scenario, "engine": engine, **rest}
        append(self.plan.records, line)

    def fail(self, round_number: int, scenario: str, engine: str, error: Exception) -> None:
        """Record that an engine failed in a scenario, and skip that combination for the rest of this
        slice."""
        self.dropped[scenario, engine] = str(error)
        self.record(round_number, scenario, engine, error=str(error))
        print(f"{engine}, {scenario}: {error}")

    def start(self, name: str, label: str | None = None) -> None:
        """Start an engine and record its time to ready."""
        label = label or name
        peer = PEERS.get(name, PEERS[OURS])
        module = peer.path if name in PEERS else "benchmarks.engines.peers.adapters.machine"
        load = {
            "checkpoint": str(self.checkpoint),
            "threads": len(self.plan.cores),
            "kv_bytes": self.plan.kv_bytes,
            "options": peer.options,
        }
        if name not in PEERS:
            load["options"] = {"in": self.model.hidden, "out": 2 * self.model.ffn}
        first = work("first", FIRST, "") if name in PEERS else FLOOR_WORK
        try:
            load["converted"] = str(self._converted(name))
            engine = Engine(
                [str(setup.python(peer, self.plan.folder)), "-m", "benchmarks.engines.peers.child", module],
                setup.variables(peer, self.plan.cores),
                self.plan.folder / "logs" / f"{label}.log",
                self.plan.cores,
                load,
                first,
            )
        except (EngineError, OSError) as error:
            self.fail(0, "ready", label, error)
            return
        engine.stop()
        self.running[label] = engine
        if label in PEERS:
            about = {"version": engine.version, "precision": engine.precision}
            self.record(0, "ready", label, cost=engine.ready, value=engine.ready, unit="s", **about)

    def serve(self, name: str, ports: dict[str, int]) -> None:
        """Start an engine's HTTP server, and store its port if it starts."""
        peer, port, plan = PEERS[name], http.free_port(), self.plan
        arguments = peer.adapter.serve(
            self.checkpoint, self._converted(name), port, len(plan.cores), plan.kv_bytes, peer.options
        )
        server = Process(
            [str(setup.python(peer, plan.folder)), *arguments],
            setup.variables(peer, plan.cores),
            plan.folder / "logs" / f"{name}-http.log",
            plan.cores,
        )
        self.running[name] = server
        try:
            ready = http.wait_ready(server, port, text(work("first", FIRST, "")["turns"][0][0]))
        except EngineError as error:
            self.fail(0, "ready-http", name, error)
            self.running.pop(name).end(0)
            return
        server.stop()
        ports[name] = port
        self.record(0, "ready-http", name, cost=ready, value=ready, unit="s")

    def _converted(self, name: str) -> Path:
        peer = PEERS.get(name, PEERS[OURS])
        return setup.converted(peer, self.checkpoint, self.plan.folder, self.plan.cores)

    def floors(self, scenario: Scenario) -> dict[str, dict[str, float]]:
        """Return by width the scenario's least seconds, from the machine's speed now, and the measured
        speeds."""
        with self.alone(MACHINE) as machine:
            assert isinstance(machine, Engine)
            bandwidth, rate, rate_int8 = machine.run(FLOOR_WORK)["answers"][0][0]
        rates = {"bf16": rate, "int8": rate_int8, "int4": rate_int8}
        return {
            width: {
                "floor": floor(self.model, scenario, bandwidth, rate, width),
                "bandwidth": bandwidth,
                "rate": rate,
            }
            for width, rate in rates.items()
        }

    @contextmanager
    def alone(self, name: str) -> Iterator[Process]:
        """Run the engine for the duration of the block; all others are stopped."""
        process = self.running[name]
        process.go()
        try:
            yield process
        finally:
            process.stop()

    def end(self, grace: float) -> None:
        """End all engines; those that have not exited after `grace` seconds each are killed."""
        for process in self.running.values():
            process.end(grace)


@contextmanager
def slice_of(plan: Plan) -> Iterator[Slice]:
    """Create a slice with the machine's floor running; all engines end with it."""
    part = Slice(plan)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a time limit leaves no engine running
    try:
        part.start(MACHINE)
        if MACHINE not in part.running:
            raise SystemExit("the floor cannot be measured")
        yield part
        part.end(grace=15)
    except BaseException:
        part.end(grace=0)
        raise


def try_out(plan: Plan) -> dict[str, str]:
    """Start every engine once, alone; return the failures."""
    failed = {}
    part = Slice(plan)
    for name in plan.peers:
        print(f"starting {PEERS[name].title} …", flush=True)
        try:
            part.start(name)
        except subprocess.CalledProcessError as error:
            failed[name] = error.stderr.strip()[-600:]
        if (reason := part.dropped.get(("ready", name))) is not None:
            failed[name] = reason
        part.end(grace=15)
        part.running.clear()
    return failed


def offline(plan: Plan) -> None:
    """Measure the engines' libraries."""
    with slice_of(plan) as part, _progress(plan.rounds * len(plan.scenarios)) as progress:
        for name in plan.peers:
            part.pause()
            progress.console.print(f"starting {name}")
            part.start(name)
        bar = progress.add_task("measuring", total=plan.rounds * len(plan.scenarios))
        for number in range(plan.rounds):
            for name in plan.scenarios:
                part.pause()
                progress.update(bar, description=f"round {number + 1}: {SCENARIOS[name].title}")
                _measure_scenario(part, number, name)
                progress.advance(bar)
        for name, process in part.running.items():
            if name in PEERS:
                for kind, size in process.memory().items():
                    part.record(0, f"memory-{kind}", name, cost=size, value=size / 1e6, unit="MB")


def _measure_scenario(part: Slice, number: int, name: str) -> None:
    scenario = SCENARIOS[name]
    task = work(name, scenario, f"{part.name} {number}")
    floors = part.floors(scenario)
    measured: dict[str, dict[str, Any]] = {}
    firsts: dict[str, list[int]] = {}
    for engine in _rotated(part.plan.peers, number):
        if (name, engine) in part.dropped or engine not in part.running:
            continue
        try:
            with part.alone(engine) as process:
                assert isinstance(process, Engine)
                done = process.run(task)
        except EngineError as error:
            part.fail(number, name, engine, error)
            continue
        measured[engine] = {
            "cost": done["seconds"],
            "value": scenario.tokens / done["seconds"],
            "unit": "tokens/s",
            **floors[width_of(engine)],
        }
        firsts[engine] = [answer[0] for answer in done["answers"][0]]
    for engine, entry in measured.items():
        agree, ours = None, OURS_OF[width_of(engine)]
        if engine != ours and ours in firsts:
            same = [a == b for a, b in zip(firsts[engine], firsts[ours], strict=True)]
            agree = sum(same) / len(same)
        part.record(number, name, engine, **entry, agree=agree)


def over_http(plan: Plan) -> None:
    """Measure the servers, and our library of each width on the same work for comparison."""
    with slice_of(plan) as part, _progress(plan.rounds) as progress:
        ports: dict[str, int] = {}
        for name in plan.peers:
            part.pause()
            progress.console.print(f"starting {name}'s server")
            part.serve(name, ports)
        libraries = tuple(OFFLINE_OF[width] for width in dict.fromkeys(map(width_of, plan.peers)))
        for name in libraries:
            part.pause()
            part.start(OURS_OF[width_of(name)], name)
        bar = progress.add_task("HTTP", total=plan.rounds)
        for number in range(plan.rounds):
            part.pause()
            _measure_servers(part, number, ports, (*plan.peers, *libraries))
            progress.advance(bar)


def _measure_servers(part: Slice, number: int, ports: dict[str, int], names: Sequence[str]) -> None:
    task = work("http", HTTP, f"{part.name} {number}")
    prompts = [text(ids) for ids in task["turns"][0]]
    floors = part.floors(HTTP)
    for name in _rotated(names, number):
        if ("http", name) in part.dropped or name not in part.running:
            continue
        try:
            with part.alone(name) as process:
                if isinstance(process, Engine):
                    seconds = process.run(task)["seconds"]
                else:
                    seconds = http.measure(ports[name], prompts, HTTP.out)
        except (EngineError, OSError) as error:
            part.fail(number, "http", name, error)
            continue
        measured = {"cost": seconds, "value": HTTP.tokens / seconds, "unit": "tokens/s"}
        part.record(number, "http", name, **measured, **floors[width_of(name)])


def _rotated(names: Sequence[str], by: int) -> list[str]:
    """Return the names rotated by round, so that no engine always follows the same one."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def _progress(total: int) -> Progress:
    return Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
