"""With one draft model for many target servers, the text is the same, also when the service or the network
fails."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamserve.llm.async_llm import AsyncLLM
from streamserve.settings.options import SettingsError
from streamserve.settings.resolve import resolve
from tests.conftest import Scale
from tests.draft_service.network import Drafting, Network, drafting
from tests.drafting import Request, all_answers, local_texts, make_requests, make_target_and_draft, targets

TARGETS = 4
FLAGS = "--threads", "1", "--no-admission"
"""Flags without admission control: such small models gain nothing from a draft service, which would refuse
all targets but one."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_target_and_draft(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def shared_service(pair: tuple[str, str]) -> Iterator[Drafting]:
    with drafting(pair[1], *FLAGS) as service:
        yield service


def accepted_from_services(llms: list[AsyncLLM]) -> list[int]:
    """Return by target the number of accepted draft tokens from services, according to its latest report."""
    reports = [llm.report() for llm in llms]
    return [report.remote.accepted if report and report.remote else 0 for report in reports]


async def until_accepted(llms: list[AsyncLLM], workload: list[Request], texts: list, name: str) -> list[int]:
    """Send requests until every target has accepted new draft tokens of a service. Texts must not change."""
    deadline = time.monotonic() + 100
    before = accepted_from_services(llms)
    for turn in range(1000):
        again, _ = await all_answers(llms, workload, f"{name}-{turn}")
        assert again == [texts] * len(llms)
        new = [now - was for now, was in zip(accepted_from_services(llms), before, strict=True)]
        if all(new):
            return new
        assert time.monotonic() < deadline, new
    raise AssertionError


async def until_reported(llms: list[AsyncLLM], services: int) -> None:
    """Wait until every target reports sessions with this number of services."""

    def all_say_so() -> bool:
        reports = [llm.report() for llm in llms]
        return all(report and report.remote and report.remote.services == services for report in reports)

    await until(all_say_so)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_text_is_the_same_when_the_service_fails(
    pair: tuple[str, str], scale: Scale, record: Callable[..., None]
) -> None:
    target, draft = pair
    workload = make_requests(scale.pick(3, 16), scale.seed)
    texts, accepted = local_texts(target, "none", workload)
    assert accepted == 0
    with_draft, accepted = local_texts(target, draft, workload)
    assert with_draft == texts
    assert accepted > 0
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(drafting(draft, *FLAGS, "--num-blocks", "200"))
        network = stack.enter_context(Network(service.address, scale.seed))
        async with targets(target, scale.pick(2, TARGETS), network.address) as llms:
            await until_reported(llms, 1)
            before = await until_accepted(llms, workload, texts, "first")
            for turn in range(scale.pick(1, 20)):
                network.break_connections()
                again, _ = await all_answers(llms, workload, f"broken-{turn}")
                assert again == [texts] * len(llms)
            service.kill()
            again, _ = await all_answers(llms, workload, "dying")
            assert again == [texts] * len(llms)
            await until_reported(llms, 0)
            for turn in range(2):  # Earlier draft tokens may be reported after the first report.
                before_requests = accepted_from_services(llms)
                again, _ = await all_answers(llms, workload, f"dead-{turn}")
                assert again == [texts] * len(llms)
            stack.enter_context(drafting(draft, *FLAGS, port=service.port))
            await until_reported(llms, 1)
            assert accepted_from_services(llms) == before_requests, "there was no service to draft"
            after = await until_accepted(llms, workload, texts, "restarted")
    assert network.broken
    assert network.lost + network.doubled + network.overtaken > 20
    record(
        targets=len(llms), lost=network.lost, doubled=network.doubled, overtaken=network.overtaken,
        broken=network.broken, accepted_before=before, accepted_after=after,
    )  # fmt: skip


async def test_each_worker_of_a_server_has_a_session(pair: tuple[str, str], shared_service: Drafting) -> None:
    target, _ = pair
    workload = make_requests(4, 2)
    texts, _ = local_texts(target, "none", workload)
    async with targets(target, 1, shared_service.address, workers=2, router="round-robin") as llms:
        await until_reported(llms, 2)
        workers = llms[0]._runtime.fleet.workers.values()
        reports = []
        for turn in range(100):
            again, _ = await all_answers(llms, workload, f"turn-{turn}")
            assert again == [texts]
            reports = [worker.report.remote for worker in workers if worker.report]
            if all(report and report.accepted for report in reports):
                break
        assert len(reports) == 2
        assert all(report and report.accepted for report in reports)


def trees(service: Drafting) -> float:
    """Return the number of trees that the service has sent, according to its latest report."""
    return service.metric("trees_total")


async def test_sequences_share_two_services_and_go_on_at_one_when_the_other_dies(
    pair: tuple[str, str], scale: Scale, record: Callable[..., None]
) -> None:
    """Sequences share two services, and continue with one when the other dies: every target uses both until
    the service with the most drafts dies."""
    target, draft = pair
    workload = make_requests(scale.pick(4, 8), 1)
    texts, _ = local_texts(target, "none", workload)
    flags = *FLAGS, "--metrics", "127.0.0.1:0"
    with drafting(draft, *flags) as first, drafting(draft, *flags) as second:
        addresses = f"{first.address},{second.address}"
        async with targets(target, scale.pick(1, TARGETS), addresses) as llms:
            await until_reported(llms, 2)
            for _ in range(20):
                await until_accepted(llms, workload, texts, "both")
                shared = sorted((trees(first), trees(second)))
                if shared[0] > 0:
                    break
            assert shared[0] > 0, "one service drafted for all sequences"
            busiest, other = sorted((first, second), key=trees, reverse=True)
            drafted = trees(other)
            running = asyncio.create_task(all_answers(llms, workload, "dying"))
            await asyncio.sleep(0.1)
            busiest.kill()
            again, _ = await running
            assert again == [texts] * len(llms)
            await until_reported(llms, 1)
            after = await until_accepted(llms, workload, texts, "one")
            await until(lambda: trees(other) > drafted)
    record(targets=len(llms), services=2, shared=shared, accepted_after=after)


async def test_a_target_with_kv_of_8_bits_takes_draft_tokens(
    pair: tuple[str, str], shared_service: Drafting, scale: Scale
) -> None:
    """A target with 8-bit KV accepts draft tokens. The service's KV has its model's data type, as only draft
    tokens are sent."""
    if not scale.full:
        pytest.skip("with --full; rows of tests/combinations/test_live.py have it too")
    target, _ = pair
    workload = make_requests(2, 2)
    texts, _ = local_texts(target, "none", workload, "int8")
    async with targets(target, 1, shared_service.address, kv_cache_dtype="int8") as llms:
        await until_reported(llms, 1)
        assert all(await until_accepted(llms, workload, texts, "int8"))


async def test_a_missing_service_is_logged_and_used_when_it_starts(
    pair: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A missing service is logged, and used once it starts, with the documented flags: `keys new`, --key,
    --clients, --share, --explain. The service logs a line for each session, without its texts."""
    target, draft = pair
    workload = make_requests(2, 3)
    texts, _ = local_texts(target, "none", workload)
    service_key, client_key = tmp_path / "drafts.key", tmp_path / "here.key"
    service_public, client_public = (keys_new(file) for file in (service_key, client_key))
    (tmp_path / "clients").write_text(f"{client_public} web-1\n")
    flags = (
        "--key", str(service_key), "--clients", str(tmp_path / "clients"), "--share", "web-1=2", "--explain",
    )  # fmt: skip
    with socket.socket() as taken:  # a free port
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    log_parts: list[str] = []

    def logged(text: str) -> bool:
        log_parts.append(capfd.readouterr().err)
        return text in "".join(log_parts)

    address = f"tcp://{service_public}@127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        async with targets(target, 1, address, log_level="warning", draft_key=str(client_key)) as llms:
            await until(lambda: logged(f"tcp://127.0.0.1:{port} does not answer"))
            again, _ = await all_answers(llms, workload, "alone")
            assert again == [texts]
            assert accepted_from_services(llms) == [0]
            service = stack.enter_context(drafting(draft, *FLAGS, *flags, port=port))
            await until_reported(llms, 1)
            await until_accepted(llms, workload, texts, "there")
            await until(lambda: service.printed("load     predicted"))
        await until(lambda: service.printed(" closed, as "))
    assert logged(f"tcp://127.0.0.1:{port} answers again")
    (opened,) = (line for line in service.lines if " opened: target 'web-1'" in line)
    assert client_public[:16] in opened
    longest_prompt = max((prompt for prompt, _ in workload), key=len)
    assert len(longest_prompt) > 8
    assert not any(str(longest_prompt[:4])[1:-1] in line for line in service.lines)


def keys_new(file: Path) -> str:
    """Create a key and return its public key, as printed."""
    command = [sys.executable, "-m", "streamserve", "keys", "new", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"draft": "tcp://10.0.0.1:7700"}, "keys"),
        ({"draft": "tcp://nowhere"}, "tcp://HOST:PORT"),
        ({"draft": "tcp://" + "a" * 64 + "@localhost:7700"}, "draft_key"),
        ({"draft": "tcp://127.0.0.1:1", "speculation_mode": "rejection"}, "coupled"),
    ],
)
def test_invalid_settings_are_refused(pair: tuple[str, str], overrides: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve(pair[0], overrides)


def test_a_service_that_other_machines_can_reach_needs_keys(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "streamserve", "draft", "--listen", "tcp://0.0.0.0:0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--key" in done.stderr
