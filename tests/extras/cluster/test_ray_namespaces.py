"""With a Ray node on each of two machines (network and process namespaces), the server on one and its worker
on the other, an OpenAI client gets the text of one local worker, also when the worker's Ray node is
killed."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from streamserve.llm.async_llm import AsyncLLM
from streamserve.settings.resolve import resolve
from tests.api.serving import served, until
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.extras.cluster.namespaces import why_not_permitted
from tests.extras.cluster.ray_machines import SECONDS, ray_machines, why_no_ray

REFUSED = why_no_ray() or why_not_permitted()
pytestmark = pytest.mark.skipif(bool(REFUSED), reason=REFUSED)
STREAMS = 16
LEASE = 5.0
SETTINGS = {"threads": 1, "profile": False, "num_blocks": 400, "max_chunk": 32}
FLAGS = ("--num-blocks", "400", "--max-chunk", "32", "--join-lease", str(LEASE))
Answer = list[tuple[str, str | None]]


def answer(url: str, number: int, begun: Callable[[], None] = lambda: None) -> Answer:
    """Return the text and the finish reason of each choice of a streamed completion. `begun` is called at the
    first text."""
    rng = random.Random(number)
    choices = 1 + number % 3 // 2
    texts, reasons = [""] * choices, [None] * choices
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
        stream = client.completions.create(
            model=client.models.list().data[0].id,
            prompt=[rng.randrange(5, 200) for _ in range(rng.randint(1, 120))],
            temperature=number % 2, seed=number, n=choices, max_tokens=rng.choice((24, 60, 200)), stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            begun()
    return list(zip(texts, reasons, strict=True))


def expected_answers(checkpoint: Path) -> list[Answer]:
    async def start() -> AsyncLLM:
        llm = AsyncLLM(resolve(str(checkpoint), SETTINGS))
        await llm.start()
        return llm

    with served(start) as server:
        until(lambda: server.http.get("/health").status_code == 200)
        return [answer(server.url, number) for number in range(STREAMS)]


def is_ready(url: str, starts: int) -> bool:
    """Return whether the worker has been started at least this number of times, and all workers are ready."""
    workers = httpx.get(f"{url}/v1/router").json()["workers"]
    return all(worker["ready"] and worker["starts"] >= starts for worker in workers)


def test_a_killed_ray_node_costs_time_never_text(
    tmp_path: Path, scale: Scale, record: Callable[..., None]
) -> None:
    """A killed Ray node costs time and never changes the text. The node is started again, and Ray places
    another agent there."""
    if not scale.full:
        pytest.skip("with --full")
    checkpoint = make_checkpoint(tmp_path / "model")
    expected = expected_answers(checkpoint)
    with ray_machines(2) as made, ThreadPoolExecutor(STREAMS) as threads:
        url = made.serve(checkpoint, *FLAGS)
        assert made.machine_of("unified-0") == 2
        assert list(threads.map(lambda number: answer(url, number), range(STREAMS))) == expected

        begun = threading.Event()
        answers = [threads.submit(answer, url, number, begun.set) for number in range(STREAMS)]
        assert begun.wait(SECONDS)
        made.kill(2)
        killed = time.monotonic()
        interrupted = sum(not asked.done() for asked in answers)
        assert interrupted
        made.join(2)
        assert [asked.result() for asked in answers] == expected
        answered = time.monotonic() - killed
        until(lambda: is_ready(url, 2), SECONDS)
        recovery = time.monotonic() - killed
        assert made.machine_of("unified-0") == 2
    figures = {"interrupted": interrupted, "answered": round(answered, 2), "ready_again": round(recovery, 2)}
    record(streams=STREAMS, lease=LEASE, **figures)
    print(figures)
