"""One draft model for many servers as a user meets it: the same text, whatever becomes of service and
network."""

import asyncio
import contextlib
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.messages import Submit
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.resolve import SettingsError, resolve
from streamserve.text.output import Delta, Usage
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.draft_service.network import Drafting, Network, drafting
from tests.exact.guessing import Case, disturb, make_engine, run

TARGETS = 4
FLAGS = "--threads", "1", "--no-admission"
"""Models as small as these gain nothing by drafts from elsewhere: all but one target would be turned away."""
Request = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a draft that is the target with disturbed weights."""
    target = make_checkpoint(tmp_path_factory.mktemp("target"))
    draft = make_checkpoint(tmp_path_factory.mktemp("draft"))
    disturb(draft, 0.03)
    return str(target), str(draft)


@contextlib.asynccontextmanager
async def targets(target: str, count: int, draft: str, **more: str) -> AsyncIterator[list[AsyncLLM]]:
    """So many servers, each with an engine in a process of its own."""
    given = {
        "threads": 1, "profile": False, "num_blocks": 400, "draft": draft, "speculation_policy": "fixed:3",
        "log_level": "error", **more,
    }  # fmt: skip
    llms = [AsyncLLM(resolve(target, given)) for _ in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        await asyncio.gather(*(llm.start() for llm in llms))
        for llm in llms:
            stack.push_async_callback(llm.close)
        yield llms


def requests(count: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    found = []
    for number in range(count):
        prompt = [rng.randrange(4, 300) for _ in range(rng.randint(2, 60))]
        temperature = 0.0 if number % 2 else 0.7
        penalty = rng.choice((0.0, 0.5))
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=48, ignore_eos=True, presence_penalty=penalty
        )
        found.append((prompt, params))
    return found


def here(target: str, draft: str, asked: list[Request]) -> tuple[list[list[int]], int]:
    """The texts by an engine in this process with a draft model of its own, and its accepted guesses."""
    case = Case(draft="model" if draft != "none" else "none", policy="fixed:3")
    engine = make_engine((Path(target), Path(draft)), case)
    submits = [Submit(str(n), 0, *request, {0: []}, 0.0) for n, request in enumerate(asked)]
    texts = [[token.token for token in tokens] for tokens in run(engine, submits, 2).values()]
    engine.executor.close()
    return texts, engine.speculation.counters.accepted


async def answer(llm: AsyncLLM, request: Request, name: str) -> tuple[list[int], int]:
    """Its tokens, and how many of them were accepted guesses."""
    tokens: list[int] = []
    accepted = 0
    async with aclosing(llm.submit(*request, request_id=name)) as items:
        async for item in items:
            if isinstance(item, Delta):
                tokens += item.tokens
            elif isinstance(item, Usage):
                accepted = item.accepted_tokens
    return tokens, accepted


async def answers(llm: AsyncLLM, asked: list[Request], name: str) -> tuple[list[list[int]], int]:
    """Two at a time."""
    found: list[tuple[list[int], int]] = []
    for start in range(0, len(asked), 2):
        part = asked[start : start + 2]
        found += await asyncio.gather(
            *(answer(llm, request, f"{name}-{start + n}") for n, request in enumerate(part))
        )
    return [tokens for tokens, _ in found], sum(accepted for _, accepted in found)


async def all_answers(llms: list[AsyncLLM], asked: list[Request], name: str) -> tuple[list, list[int]]:
    found = await asyncio.gather(*(answers(llm, asked, f"{name}-{n}") for n, llm in enumerate(llms)))
    return [texts for texts, _ in found], [accepted for _, accepted in found]


def by_services(llms: list[AsyncLLM]) -> list[int]:
    """Guesses of services that each target has accepted so far, as its latest report has it."""
    reports = [llm.report() for llm in llms]
    return [report.remote.accepted if report and report.remote else 0 for report in reports]


async def until_accepted(llms: list[AsyncLLM], asked: list[Request], texts: list, name: str) -> list[int]:
    """Ask until every target has accepted new guesses of a service; the texts are always the same."""
    deadline = time.monotonic() + 60
    before = by_services(llms)
    for turn in range(1000):
        again, _ = await all_answers(llms, asked, f"{name}-{turn}")
        assert again == [texts] * len(llms)
        new = [now - was for now, was in zip(by_services(llms), before, strict=True)]
        if all(new):
            return new
        assert time.monotonic() < deadline, new
    raise AssertionError


async def until_reported(llms: list[AsyncLLM], services: int) -> None:
    """Wait until every target says that it has sessions with so many services."""

    def all_say_so() -> bool:
        reports = [llm.report() for llm in llms]
        return all(report and report.remote and report.remote.services == services for report in reports)

    await until(all_say_so)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_text_is_the_same_whatever_becomes_of_the_service(
    pair: tuple[str, str], scale: Scale, record: Callable[..., None]
) -> None:
    target, draft = pair
    asked = requests(scale.pick(3, 16), scale.seed)
    texts, accepted = here(target, "none", asked)
    assert accepted == 0
    beside, accepted = here(target, draft, asked)
    assert beside == texts
    assert accepted > 0
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(drafting(draft, *FLAGS, "--num-blocks", "200"))
        network = stack.enter_context(Network(service.address, scale.seed))
        async with targets(target, TARGETS, network.address) as llms:
            await until_reported(llms, 1)
            before = await until_accepted(llms, asked, texts, "first")
            for turn in range(scale.pick(1, 20)):
                network.break_connections()
                again, _ = await all_answers(llms, asked, f"broken-{turn}")
                assert again == [texts] * TARGETS
            service.kill()
            again, _ = await all_answers(llms, asked, "dying")
            assert again == [texts] * TARGETS
            await until_reported(llms, 0)
            for turn in range(2):  # what came before may be reported after the first
                had = by_services(llms)
                again, _ = await all_answers(llms, asked, f"dead-{turn}")
                assert again == [texts] * TARGETS
            stack.enter_context(drafting(draft, *FLAGS, port=service.port))
            await until_reported(llms, 1)
            assert by_services(llms) == had, "nobody was there to guess"
            after = await until_accepted(llms, asked, texts, "restarted")
    assert network.broken
    assert network.lost + network.doubled + network.overtaken > 20
    record(
        targets=TARGETS, lost=network.lost, doubled=network.doubled, overtaken=network.overtaken,
        broken=network.broken, accepted_before=before, accepted_after=after,
    )  # fmt: skip


def trees(service: Drafting) -> float:
    """How many it has sent, as it last reported."""
    return service.metric("trees_total")


async def test_sessions_move_when_their_service_dies(
    pair: tuple[str, str], scale: Scale, record: Callable[..., None]
) -> None:
    """M services for N targets: the one that has drafted most dies."""
    target, draft = pair
    asked = requests(2, 1)
    texts, _ = here(target, "none", asked)
    flags = *FLAGS, "--metrics", "127.0.0.1:0"
    with drafting(draft, *flags) as first, drafting(draft, *flags) as second:
        addresses = f"{first.address},{second.address}"
        async with targets(target, scale.pick(2, TARGETS), addresses) as llms:
            await until_reported(llms, 2)
            await until_accepted(llms, asked, texts, "both")
            await until(lambda: trees(first) + trees(second) > 0)
            busiest, other = sorted((first, second), key=trees, reverse=True)
            moved = trees(other)
            busiest.kill()
            await until_reported(llms, 1)
            after = await until_accepted(llms, asked, texts, "one")
            await until(lambda: trees(other) > moved)
    record(targets=len(llms), services=2, accepted_after=after)


async def test_a_service_that_is_not_there_is_named_and_used_when_it_comes(
    pair: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With all that the documentation has: `keys new`, --key, --clients, --share, --explain; and a line for
    each session, nothing of its texts."""
    target, draft = pair
    asked = requests(2, 3)
    texts, _ = here(target, "none", asked)
    service_key, own_key = tmp_path / "drafts.key", tmp_path / "here.key"
    public, own = (keys_new(file) for file in (service_key, own_key))
    (tmp_path / "clients").write_text(f"{own} web-1\n")
    flags = (
        "--key", str(service_key), "--clients", str(tmp_path / "clients"), "--share", "web-1=2", "--explain",
    )  # fmt: skip
    with socket.socket() as taken:  # a port that is nobody's
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    said: list[str] = []

    def says(text: str) -> bool:
        said.append(capfd.readouterr().err)
        return text in "".join(said)

    there = f"tcp://{public}@127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        async with targets(target, 1, there, log_level="warning", draft_key=str(own_key)) as llms:
            await until(lambda: says(f"tcp://127.0.0.1:{port} does not answer"))
            again, _ = await all_answers(llms, asked, "alone")
            assert again == [texts]
            assert by_services(llms) == [0]
            service = stack.enter_context(drafting(draft, *FLAGS, *flags, port=port))
            await until_reported(llms, 1)
            await until_accepted(llms, asked, texts, "there")
            await until(lambda: service.printed("load     predicted"))
        await until(lambda: service.printed(" closed, as "))
    assert says(f"tcp://127.0.0.1:{port} is there again")
    (opened,) = (line for line in service.lines if " opened: target 'web-1'" in line)
    assert own[:16] in opened
    told = max((prompt for prompt, _ in asked), key=len)
    assert len(told) > 8
    assert not any(str(told[:4])[1:-1] in line for line in service.lines)


def keys_new(file: Path) -> str:
    """Its public half, as printed."""
    command = [sys.executable, "-m", "streamserve", "keys", "new", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"draft": "tcp://10.0.0.1:7700"}, "keys"),
        ({"draft": "tcp://nowhere"}, "tcp://HOST:PORT"),
        ({"draft": "tcp://" + "a" * 64 + "@localhost:7700"}, "draft_key"),
        ({"draft": "tcp://127.0.0.1:1", "speculation_mode": "rejection"}, "coupled"),
    ],
)
def test_settings_that_cannot_be_are_refused(pair: tuple[str, str], given: dict, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        resolve(pair[0], given)


def test_a_service_others_can_reach_needs_keys(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "streamserve", "draft", "--listen", "tcp://0.0.0.0:0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--key" in done.stderr
