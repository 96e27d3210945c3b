"""The way in which a worker ended decides what it implies about its requests: workers killed by a person cost
no request."""

import random
import signal
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.fleet.endings import ending_of
from streamserve.fleet.events import Ending, Kill, Open, Refuse, Send, Tick, WorkerLost, WorkerMessage
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.quarantine import MAX_KILLS
from streamserve.protocol.messages import Events, Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.system.oom_kills import oom_kills, rose
from tests.fleet.fakes import OPEN, READY, W, started

ENDINGS: tuple[Ending, ...] = ("fault", "outside", "unclear")
TOKENS = 9


@pytest.mark.parametrize(
    ("status", "out_of_memory", "ending"),
    [
        (70, False, "fault"),
        (0, False, "fault"),
        (-signal.SIGSEGV, False, "fault"),
        (-signal.SIGABRT, False, "fault"),
        (-signal.SIGTERM, False, "outside"),
        (-signal.SIGTERM, True, "outside"),
        (-signal.SIGHUP, False, "outside"),
        (-signal.SIGKILL, False, "unclear"),
        (-signal.SIGKILL, True, "fault"),
        (None, False, "unclear"),
        (None, True, "fault"),
    ],
)
def test_an_exit_status_says_whether_requests_may_be_the_cause(
    status: int | None, out_of_memory: bool, ending: Ending
) -> None:
    assert ending_of(status, out_of_memory) == ending


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


MEMORY_EVENTS = "low 0\nhigh 0\nmax 3\noom 1\noom_kill {}\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        ("0::/a/b\n", "sys/fs/cgroup/a/b/memory.events", MEMORY_EVENTS),
        ("0::/a/b\n", "sys/fs/cgroup/memory.events", MEMORY_EVENTS),
        ("4:memory:/a\n", "sys/fs/cgroup/memory/a/memory.oom_control", "under_oom 0\noom_kill {}\n"),
        ("4:memory:/a\n", "sys/fs/cgroup/memory/memory.oom_control", "under_oom 0\noom_kill {}\n"),
        ("0::/\n", "proc/vmstat", "nr_free_pages 7\noom_kill {}\ndrop_slab 0\n"),
        ("", "proc/vmstat", "oom_kill {}\n"),
    ],
    ids=["version 2", "container", "version 1", "container of version 1", "machine", "no groups"],
)
def test_the_kernels_counters_of_killed_processes_are_read(
    groups: str, file: str, text: str, tmp_path: Path
) -> None:
    write(tmp_path, {"proc/self/cgroup": groups, file: text.format(4)})
    before = oom_kills(tmp_path)
    assert before == (4,)
    assert not rose(before, oom_kills(tmp_path))
    write(tmp_path, {file: text.format(5)})
    assert rose(before, oom_kills(tmp_path))


def test_without_counters_nothing_rises(tmp_path: Path) -> None:
    write(tmp_path, {"proc/vmstat": "oom_kill many\noom_kill\n", "proc/self/cgroup": "nonsense\n1:memory\n"})
    assert oom_kills(tmp_path) == ()
    assert not rose((), ())
    assert not rose((), (3,)), "a counter that only just appeared must not count"


class Worker:
    """A fleet's only worker, which a test can let die and compute."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.incarnation = 1
        self.now = 1.0
        self.refused: dict[str, str] = {}

    @property
    def attempts(self) -> dict[str, int]:
        """Return the attempts that the worker runs, by request."""
        return {name: r.attempt for name, r in self.fleet.requests.items() if r.worker == W}

    def die(self, suspects: Iterable[int] | None, ending: Ending) -> None:
        """End the worker's process and start it again."""
        named = None if suspects is None else frozenset(suspects)
        self._do(WorkerLost(W, self.incarnation, "it died", named, "run", ending=ending))
        self.incarnation += 1
        self._do(WorkerMessage(W, self.incarnation, READY))

    def compute(self, name: str) -> None:
        """Generate two more tokens of a request."""
        request = self.fleet.requests[name]
        first = len(request.outputs[0])
        tokens = [
            Token(name, request.attempt, 0, index, 7, finish="length" if index == TOKENS - 1 else None)
            for index in range(first, min(first + 2, TOKENS))
        ]
        self._do(WorkerMessage(W, self.incarnation, Events([*tokens])))

    def wait(self) -> None:
        """Let half a second pass."""
        self._do(Tick())

    def _do(self, event: WorkerLost | WorkerMessage | Tick) -> None:
        self.now += 0.5
        for command in self.fleet.handle(event, self.now):
            assert not isinstance(command, Kill)
            if isinstance(command, Refuse):
                self.refused[command.request] = str(command.error)


def serving(requests: int) -> Worker:
    fleet = started(stuck_after=1e6)
    for number in range(requests):
        fleet.handle(Open(f"r{number}", [1, 2], SamplingParams(seed=1, max_tokens=TOKENS)), 0.5)
    return Worker(fleet)


@given(
    seed=st.integers(0, 2**32), requests=st.integers(1, 6), progress=st.floats(0.0, 0.5),
    endings=st.lists(st.sampled_from(ENDINGS), min_size=1, max_size=3),
)  # fmt: skip
def test_a_request_is_refused_only_if_it_was_there_alone_often_enough(
    seed: int, requests: int, progress: float, endings: list[Ending]
) -> None:
    """A request is refused only if it was alone on a worker that died, sufficiently often. Workers die at
    random, whatever requests they run."""
    rng, worker = random.Random(seed), serving(requests)
    alone: Counter[tuple[str, Ending]] = Counter()
    for _ in range(60):
        there = worker.attempts
        if rng.random() < progress and there:
            name = rng.choice(sorted(there))
            worker.compute(name)
            continue
        ending = rng.choice(endings)
        suspects = rng.choice((None, (), there.values(), [n for n in there.values() if rng.random() < 0.5]))
        before = set(worker.refused)
        if len(there) == 1:
            alone[next(iter(there)), ending] += 1
        worker.die(suspects, ending)
        for name in set(worker.refused) - before:
            assert ending != "outside"
            assert alone[name, "fault"] >= 3 or alone[name, "unclear"] >= MAX_KILLS, worker.refused[name]
    if set(endings) == {"outside"}:
        assert not worker.refused
        assert not any(request.isolated for request in worker.fleet.requests.values()), (
            "no request is a suspect"
        )


@given(seed=st.integers(0, 2**32), requests=st.integers(2, 16), ending=st.sampled_from(("fault", "unclear")))
def test_a_request_that_ends_each_worker_is_refused_and_the_others_are_served(
    seed: int, requests: int, ending: Ending
) -> None:
    """A request that ends each worker is refused, and the others are served; also when other deaths that do
    not count are mixed in, such as by a daemon when memory is short."""
    rng, worker = random.Random(seed), serving(requests)
    poison = f"r{rng.randrange(requests)}"
    for _ in range(1000):
        if not worker.fleet.requests:
            break
        there = worker.attempts
        if poison in there:
            worker.die(rng.choice((None, there.values())), ending)
        elif there:
            worker.compute(rng.choice(sorted(there)))
        else:
            worker.wait()
    assert not worker.fleet.requests, "each is served or refused"
    assert set(worker.refused) == {poison}
    times = 3 if ending == "fault" else MAX_KILLS
    assert f"ended its worker {times} times while it ran alone" in worker.refused[poison]
    assert worker.incarnation <= 2 * 5 + times + 3


def test_the_only_request_is_refused_with_the_sixth_kill() -> None:
    worker = serving(1)
    for _ in range(MAX_KILLS - 1):
        worker.die(worker.attempts.values(), "unclear")
    assert not worker.refused
    worker.die(worker.attempts.values(), "unclear")
    assert set(worker.refused) == {"r0"}


def test_a_worker_that_is_asked_to_end_in_a_trial_interrupts_it() -> None:
    worker = serving(1)
    worker.die(None, "fault")
    for _ in range(50):
        assert worker.attempts, "the trial continues with the next process"
        worker.die(None, "outside")
    while worker.fleet.requests:
        worker.compute("r0")
    assert not worker.refused
    assert not len(worker.fleet.quarantine)


@pytest.mark.parametrize(
    ("ending", "deaths"), [("fault", 4), ("unclear", MAX_KILLS)], ids=["hung", "stopped"]
)
def test_a_step_that_hangs_counts_and_a_stopped_process_hardly(ending: Ending, deaths: int) -> None:
    """The fleet kills a worker whose step hangs and a stopped worker, but only the hanging step counts fully
    against its requests."""
    fleet = started(stuck_after=10.0)
    fleet.handle(OPEN, 0.0)
    for incarnation in range(1, deaths + 1):
        assert "r" in fleet.requests
        fleet.workers[W].condemn("it stands still", 1.0, fleet.supervisor._policy, ending)
        lost = WorkerLost(W, incarnation, "its process ended with SIGKILL", ending="unclear")
        commands = fleet.handle(lost, 2.0)
        fleet.handle(WorkerMessage(W, incarnation + 1, READY), 3.0)
    (refuse,) = (command for command in commands if isinstance(command, Refuse))
    times = 3 if ending == "fault" else MAX_KILLS
    assert (
        str(refuse.error) == f"request r ended its worker {times} times while it ran alone: it stands still"
    )
    assert not any(isinstance(c, Send) and isinstance(c.message, Submit) for c in commands)
