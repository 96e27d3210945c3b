"""A covering array of the settings that need tensors and processes, on real workers.

In each row all texts and log-probabilities equal a plain engine's with the same weights and KV, and every
value took effect.
"""

import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgspec
import pytest

from streamserve.baselines.routers import ROUTERS
from streamserve.protocol.config import Order
from streamserve.protocol.sampling import Slo
from tests.campaigns.settings import Trials, random_model
from tests.campaigns.settings.special import Environment
from tests.campaigns.settings.workload import TrialRequest
from tests.combinations.axes import (
    ADAPTER,
    ALWAYS,
    CLUSTER,
    HEAD,
    KEY,
    SERVICE,
    SERVICES,
    axes,
    decisions,
    join_key,
    refusal,
    settings,
    shown,
    there,
)
from tests.combinations.covering import Row, cover, draw_three
from tests.conftest import Scale
from tests.draft_service.network import drafting

REQUESTS = 40
FIXED = {
    "port": 0, "profile": False, "threads": 1, "check": True, "grammar_timeout": 60.0, "log_level": "error",
}  # fmt: skip
COUNTERS = {
    "edits": "stream_chunks",
    "handed_over": "transferred_bytes",
    "drafted": "drafted_tokens",
    "accepted": "accepted_draft_tokens",
    "served_trees": "service_trees",
    "shared_trees": "service_trees",
    "preempted": "preemptions",
    "swapped": "swaps",
    "adapted": "adapted",
}
"""The names of the counters in the outcome of a live trial."""


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    folder = tmp_path_factory.mktemp("matrix")
    return Trials({"llama": random_model(folder, "llama", "bfloat16")}, requests=REQUESTS, numbers=REQUESTS)


@pytest.fixture(scope="module")
def services(trials: Trials, scale: Scale) -> Iterator[list[str]]:
    """Yield the addresses of the draft services that the rows need."""
    model = trials.models["llama"].environment.drafts[0]
    needed = max(_services(row) for row in live_rows(scale))
    with ExitStack() as stack:
        flags = "--threads", "1", "--no-admission"
        yield [stack.enter_context(drafting(model, *flags)).address for _ in range(needed)]


def _services(row: Row) -> int:
    return {"service": 1, "services": 2}.get(str(row["draft"]), 0)


class Agent:
    """An agent that joins the heads of the rows, one after another."""

    SLOTS = 4

    def __init__(self, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.head = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self._log = log

    @contextmanager
    def running(self) -> Iterator["Agent"]:
        own = ("--join", self.head, "--key", join_key(), "--workers", str(self.SLOTS))
        with self._log.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "streamserve", "worker", *own], stdout=log, stderr=log
            )
            try:
                yield self
            finally:
                process.terminate()
                process.wait()
        assert "Traceback" not in self._log.read_text()

    def joined(self) -> int:
        """Return how many heads the agent has joined."""
        return self._log.read_text().count("joined the head")


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with Agent(tmp_path_factory.mktemp("agent") / "log").running() as running:
        yield running


class Ray:
    """A Ray cluster of one node. This process is connected to it, and the servers of the rows share the
    connection."""

    def __init__(self, address: str) -> None:
        self.address = address

    def placed(self) -> int:
        """Return how many actors have been created."""
        if not self.address:
            return 0
        from ray._private.state import actors

        return len(actors())


@pytest.fixture(scope="module")
def ray(scale: Scale) -> Iterator[Ray]:
    if not any(row["launcher"] == "ray" for row in live_rows(scale)):
        yield Ray("")
        return
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": Agent.SLOTS, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    ray.init(address=cluster.address, logging_level="warning")
    try:
        yield Ray(cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()


def overrides(
    row: Row, services: list[str], environment: Environment, head: str, cluster: str
) -> dict[str, Any]:
    """Return the settings of a row, with existing addresses and files in place of placeholders."""
    existing = {
        SERVICE: ",".join(services[:1]), SERVICES: ",".join(services[:2]), HEAD: head, KEY: join_key(),
        CLUSTER: cluster,
        "embedded-draft": environment.drafts[0], ADAPTER: environment.adapters[0],
    }  # fmt: skip
    return there(FIXED | settings(row), existing)


def shape_of(row: Row) -> Callable[[TrialRequest], TrialRequest]:
    """Return a function that gives requests the shape of a row: prompt streams that append, update or are
    answered early, and latency targets."""

    def shape(request: TrialRequest) -> TrialRequest:
        rng, prompt, params = Random(request.number), request.prompt, request.params
        cuts = sorted(rng.randrange(len(prompt) + 1) for _ in range(3))
        edits = tuple(prompt[:cut] for cut in cuts)
        if row["prompt"] == "update":
            edits = tuple([*edit, *(rng.randrange(4, 300) for _ in range(9))] for edit in edits)
        if row["prompt"] != "whole":
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        slo = Slo(tpot_ms=rng.choice((20.0, 500.0)), ttft_ms=5000.0) if row["targets"] != "none" else Slo()
        params = msgspec.structs.replace(params, slo=slo)
        early = row["prompt"] == "early" and not params.stop  # an early answer cannot end at these
        edits = edits if row["prompt"] != "whole" else ()
        return replace(request, params=params, edits=edits, early=early)

    return shape


ATTEMPTS = 3
"""Maximum number of times that a row is served with other requests until every value has taken effect. Some
effects depend on chance, such as several workers running out of memory together."""


def run_row(
    row: Row, seed: int, trials: Trials, services: list[str], agent: Agent, ray: Ray
) -> dict[str, int]:
    """Serve a row; return its counts. Raises AssertionError if a text is wrong, or a value took no effect."""
    chosen = overrides(row, services, trials.models["llama"].environment, agent.head, ray.address)
    total, unused = Counter[str](), list[str]()
    for attempt in range(ATTEMPTS):
        joined, placed = agent.joined(), ray.placed()
        outcome = trials.run_settings(seed + attempt * 1_000_003, "llama", chosen, shape_of(row))
        assert outcome.verdict == "passed", (row, outcome)
        assert outcome.counts["compared"] > 0
        assert outcome.counts["logprobs"] > 0
        assert (agent.joined() > joined) == (row["launcher"] == "join")
        assert (ray.placed() > placed) == (row["launcher"] == "ray")
        total += Counter(outcome.counts)
        unused = [value for value in must_show(row) if not any(total[COUNTERS[n]] for n in shown(row)[value])]
        if not unused:
            break
    assert not unused, f"{unused} not used: {row}"
    return dict(total)


def must_show(row: Row) -> list[str]:
    """Return the values of a row whose effect the row's own counters must show."""
    return [
        value
        for value in shown(row)
        # n-grams of random text are seldom accepted
        if not ("policy" in value and row["draft"] in ("none", "ngram"))
        # goodput drafts only where it pays, so its effect is checked over all rows together
        and not ("draft" in value and row["policy"] == "default")
    ]


def live_rows(scale: Scale) -> list[Row]:
    """Return the rows of the covering array, rows for further orders and routers, and some three-way
    combinations. A small run has a single row, with a machine that joins and a draft service whose policy
    drafts in every step."""
    rows = covering_rows()
    if not scale.full:
        joined = [row for row in rows if row["launcher"] == "join" and _services(row)]
        return [max(joined, key=lambda row: len(shown(row))) | {"policy": ALWAYS[0]}]
    rng = Random(f"live-{scale.seed}")
    three = (draw_three(axes("live"), rng) for _ in range(24))
    return rows + decisions(rows) + [row for row in three if not refusal(row)]


@cache
def covering_rows() -> list[Row]:
    return cover(axes("live"), refusal).rows


def test_every_order_and_router_that_users_can_choose_is_in_a_live_row() -> None:
    rows = [*covering_rows(), *decisions(covering_rows())]
    assert {row["order"] for row in rows} == set(get_args(Order))
    routers = {settings(row).get("router", "flowguard").partition(":")[0] for row in rows}
    assert routers == {*ROUTERS, "classes"}
    assert not any(refusal(row) for row in rows)


def test_rows_on_real_workers_give_the_text_of_a_plain_engine(
    trials: Trials, services: list[str], agent: Agent, ray: Ray, scale: Scale, record: Callable[..., None]
) -> None:
    rows, total = live_rows(scale), Counter[str]()
    drafted = Counter[str]()  # trees of draft services by policy
    for number, row in enumerate(rows):
        counts = run_row(row, scale.seed + number, trials, services, agent, ray)
        total += Counter(counts)
        if _services(row):
            drafted[row["policy"]] += counts["service_trees"]
    assert drafted
    assert all(drafted.values()), drafted
    launchers = Counter(row["launcher"] for row in rows)
    record(
        rows=len(rows), launchers=launchers, compared=total["compared"], adapted=total["adapted"],
        logprobs=total["logprobs"],
        withdrawn=total["withdrawn_tokens"], service_trees=drafted,
    )  # fmt: skip
