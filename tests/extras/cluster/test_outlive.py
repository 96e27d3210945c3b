"""Workers outlive their head: real processes, a head that is killed under load, and the next head."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Scale
from tests.extras.cluster.network import Link
from tests.extras.cluster.outliving import LEASE, free_port, machine, make_target, metric, until
from tests.serving import Served

CLIENTS = 6
TOKENS = 700
SHARED = [7 + n % 200 for n in range(64)]
TOPOLOGIES = {"two workers": ("--workers", "2"), "a pair": ("--pairs", "1")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("outlive"))


def body(number: int, **fields: object) -> dict[str, object]:
    return {
        "prompt": [*SHARED, 9 + number], "max_tokens": TOKENS, "temperature": 1.0, "seed": number,
        "ignore_eos": True, "logprobs": 1,
    } | fields  # fmt: skip


def ask(served: Served, number: int, **headers: str) -> dict[str, Any]:
    reply = httpx.post(f"{served.url}/v1/completions", json=body(number), headers=headers, timeout=120)
    assert reply.status_code == 200, reply.text
    whole: dict[str, Any] = reply.json()
    return whole


def until_answered(served: Served) -> float:
    """Return the seconds from a head's start to its first answer."""
    began = time.monotonic()
    fields = {"prompt": [5, 6], "max_tokens": 1}
    assert httpx.post(f"{served.url}/v1/completions", json=fields, timeout=60).status_code == 200
    return round(served.seconds + time.monotonic() - began, 2)


def answer(reply: dict[str, Any]) -> tuple[str, object]:
    return reply["choices"][0]["text"], reply["choices"][0]["logprobs"]["token_logprobs"]


@dataclass
class Client:
    """Streams an answer until the answer or the head ends."""

    served: Served
    number: int
    chunks: int = 0
    text: str = ""
    complete: bool = False
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        headers = {"Idempotency-Key": f"key-{self.number}"}
        try:
            with httpx.stream(
                "POST", f"{self.served.url}/v1/completions", json=body(self.number, stream=True),
                headers=headers, timeout=120,
            ) as reply:  # fmt: skip
                for line in reply.iter_lines():
                    if line == "data: [DONE]":
                        self.complete = True
                    elif line.startswith("data: "):
                        self.chunks += 1
                        choices = json.loads(line[6:])["choices"]
                        self.text += choices[0]["text"] if choices else ""
        except httpx.HTTPError:
            pass


def killed_under_load(served: Served) -> list[Client]:
    """Kill a head while clients read their answers."""
    clients = [Client(served, number) for number in range(CLIENTS)]
    until(lambda: all(client.chunks > 10 for client in clients))
    served.process.kill()
    for client in clients:
        client.thread.join(30)
    assert not all(client.complete for client in clients)
    return clients


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_next_head_adopts_the_workers_and_clients_resume(
    checkpoint: Path, tmp_path: Path, topology: str, scale: Scale, record: Callable[..., None]
) -> None:
    if not scale.full and topology == "a pair":
        pytest.skip("with --full; tests/extras/cluster/test_outlive_kinds.py has a pair")
    arguments = TOPOLOGIES[topology]
    with machine(checkpoint, tmp_path) as joined:
        with joined.head(*arguments) as first:
            fresh = until_answered(first)
            expected = [answer(ask(first, number)) for number in range(CLIENTS)]
            pids = joined.workers()
            assert len(pids) == 2
            clients = killed_under_load(first)
        with joined.head(*arguments) as second:
            adopting = until_answered(second)
            assert joined.workers() == pids, "the same processes"
            until(lambda: metric(second, "workers_adopted_total") == 2)  # either of them may answer first
            assert metric(second, "worker_deaths_total") == 0
            replies = [ask(second, n, **{"Idempotency-Key": f"key-{n}"}) for n in range(CLIENTS)]
            assert [answer(reply) for reply in replies] == expected
            for client in clients:
                assert expected[client.number][0].startswith(client.text)
            received = sum(client.chunks - client.complete for client in clients)
            assert metric(second, "resumed_outputs_total") == CLIENTS
            assert metric(second, "resumed_output_tokens_total") >= received - CLIENTS
            cached = ask(second, CLIENTS)["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= len(SHARED) - 16, "the prefix cache was retained"
            record(topology=topology, first_answer_seconds=fresh, with_adoption=adopting)
            print(f"{topology}: first answer {fresh} s after the head's start, {adopting} s with adoption")


async def test_of_two_heads_at_once_the_older_one_gets_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """Of two heads at a time, the older one gets no workers: the machine reaches another head at its address
    while the first one still runs."""
    link = Link(0)
    await link.start()
    with machine(checkpoint, tmp_path, slots=1, joins=link.port) as joined, ExitStack() as heads:
        link.target, other = joined.port, free_port()
        first = await asyncio.to_thread(heads.enter_context, joined.head())
        pids = joined.workers()
        client = Client(first, 0)
        await asyncio.to_thread(until, lambda: client.chunks > 10)
        link.target = other
        link.break_connections()
        second = await asyncio.to_thread(heads.enter_context, joined.head(port=other))
        assert joined.workers() == pids
        assert metric(second, "workers_adopted_total") == 1
        first_reply = await asyncio.to_thread(ask, second, 1)
        assert first_reply["usage"]["completion_tokens"] == TOKENS
        await asyncio.to_thread(until, lambda: httpx.get(f"{first.url}/health").status_code == 503)
        had = client.chunks
        link.target = joined.port
        link.break_connections()
        await asyncio.sleep(1.5 * LEASE)
        health = await asyncio.to_thread(httpx.get, f"{first.url}/health")
        assert health.status_code == 503
        assert client.chunks == had < TOKENS
        assert joined.workers() == pids, "workers are retained for a head that is not older"
        first.process.kill()
        await asyncio.to_thread(client.thread.join, 30)
    await link.close()


def test_without_a_head_workers_end_after_a_time(checkpoint: Path, tmp_path: Path) -> None:
    with machine(checkpoint, tmp_path, keep=2.0, slots=1) as joined:
        with joined.head() as first:
            first.process.kill()
            first.process.wait()
            killed_at = time.monotonic()
        until(lambda: not joined.workers())
        assert time.monotonic() - killed_at > 2.0
        assert joined.agent.poll() is None, "the agent waits for the next head"
        with joined.head() as second:
            assert metric(second, "workers_adopted_total") == 0
            assert ask(second, 1)["usage"]["completion_tokens"] == TOKENS


def test_workers_end_with_their_head_if_they_are_not_to_be_kept(checkpoint: Path, tmp_path: Path) -> None:
    with machine(checkpoint, tmp_path, keep=0.0, slots=1) as joined:
        with joined.head() as first:
            (pid,) = joined.workers()
            first.process.kill()
        with joined.head() as second:
            assert pid not in joined.workers()
            assert metric(second, "workers_adopted_total") == 0


def test_other_settings_need_other_workers(checkpoint: Path, tmp_path: Path) -> None:
    """Other settings need other workers: a head with another KV layout ends the retained worker, whose slot
    it needs."""
    with machine(checkpoint, tmp_path, slots=1) as joined:
        with joined.head() as first:
            (pid,) = joined.workers()
            first.process.kill()
        with joined.head("--block-size", "32") as second:
            assert pid not in joined.workers()
            assert len(joined.workers()) == 1
            assert metric(second, "workers_adopted_total") == 0
            assert ask(second, 1)["usage"]["completion_tokens"] == TOKENS
