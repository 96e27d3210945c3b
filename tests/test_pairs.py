"""Stream pairs give users the text of one worker, also when workers die."""

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from streamserve.fleet.events import Send
from streamserve.llm.async_llm import AsyncLLM, worker_model
from streamserve.protocol.errors import RequestError
from streamserve.protocol.reports import TransferReport
from streamserve.protocol.sampling import SamplingParams
from streamserve.protocol.transfers import Push
from streamserve.settings.options import Settings, SettingsError
from streamserve.settings.resolve import resolve
from streamserve.system.processors import usable_processors
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.pairs import (
    NEEDS_NIXL,
    OneWorkers,
    answers,
    asked_once,
    fleet,
    make_requests,
    serving,
    until,
    wait_until_idle,
)
from tests.simulate.tampering import TAMPERED

ROUNDS = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def one_workers(checkpoint: Path) -> OneWorkers:
    return asked_once(checkpoint)


@pytest.mark.parametrize(
    "pools",
    [
        {"pairs": 1},
        {"prefill": 1, "decode": 2},
        {"pairs": 1, "kv_transport": "tcp"},
        pytest.param({"pairs": 1, "kv_transport": "nixl"}, marks=NEEDS_NIXL),
    ],
)
async def test_pairs_give_the_text_of_one_worker(
    checkpoint: Path,
    one_workers: OneWorkers,
    scale: Scale,
    pools: dict[str, object],
    record: Callable[..., None],
) -> None:
    if not scale.full and "prefill" in pools:
        pytest.skip("with --full; tests/test_workers.py has a prefill and two decode workers too")
    if not scale.full and pools == {"pairs": 1}:
        pytest.skip("with --full; tests/test_pairs_mixed.py and tests/test_pairs_widths.py have a pair too")
    requests = make_requests(scale.pick(16, 120), scale.seed)
    expected = await one_workers(requests)
    async with serving(checkpoint, **pools) as llm:
        assert await answers(llm, requests) == expected
        again = await answers(llm, requests)  # Blocks that decode workers already hold are not sent again.
        assert again == expected
        await wait_until_idle(llm)
        report = llm.report()
        assert report is not None
        assert report.transfer is not None
        assert report.transfer.sent_bytes > 0
        assert report.transfer.hit_tokens > 0
        assert report.transfer.handed_over == report.transfer.received > 0
        assert not report.transfer.failed
        record(requests=2 * len(requests), transfer=msgspec.to_builtins(report.transfer))


def transferred(llm: AsyncLLM) -> TransferReport:
    """Return the counters of KV transfers, according to the last report."""
    report = llm.report()
    assert report is not None
    assert report.transfer is not None
    return report.transfer


async def test_pairs_with_kv_of_8_bits_send_half_the_bytes(tmp_path: Path, scale: Scale) -> None:
    """Pairs with 8-bit KV send half the bytes. The text equals that of one worker with 8-bit KV, scales
    included, and a worker with another KV format has another fingerprint."""
    folder = make_checkpoint(tmp_path, dtype="bfloat16", head_dim=64)
    requests = make_requests(16, scale.seed)
    sent, fingerprints = [], set()
    for kv in ("auto", "int8"):
        expected = None
        if scale.full or kv == "int8":  # The text with another KV format is tested above.
            async with serving(folder, kv_cache_dtype=kv) as llm:
                expected = await answers(llm, requests)
        async with serving(folder, kv_cache_dtype=kv, pairs=1) as llm:
            for request in requests[:6]:  # One at a time, so that the bytes sent do not depend on the load.
                await answers(llm, [request])
                await wait_until_idle(llm)
            sent.append(transferred(llm).sent_bytes)
            assert transferred(llm).received_tokens - transferred(llm).hit_tokens > 100
            found = await answers(llm, requests)
            assert expected is None or found == expected
            await wait_until_idle(llm)
            assert not transferred(llm).failed
            caches = [worker.ready.cache for worker in fleet(llm).workers.values() if worker.ready]
            fingerprints |= {cache.fingerprint for cache in caches if cache}
    assert 0.4 < sent[1] / sent[0] < 0.75, (
        "68 bytes in place of 128, and blocks that are sent again as they fill"
    )
    assert len(fingerprints) == 2


@pytest.mark.parametrize("victims", [("prefill-0",), ("decode-0",), ("prefill-0", "decode-0")])
async def test_a_killed_worker_costs_time_never_text(
    checkpoint: Path,
    one_workers: OneWorkers,
    scale: Scale,
    victims: tuple[str, ...],
) -> None:
    if not scale.full:
        pytest.skip("with --full; tests/test_pairs_widths.py kills both, tests/test_lifecycle_events.py one")
    requests = make_requests(16, scale.seed)
    expected = await one_workers(requests)
    async with serving(checkpoint, pairs=1) as llm:
        working = asyncio.create_task(answers(llm, requests))
        await until(lambda: any(any(r.outputs.values()) for r in fleet(llm).requests.values()))
        for victim in victims:
            os.kill(llm.process_id(victim), signal.SIGKILL)
        assert await working == expected
        await until(lambda: all(fleet(llm).workers[v].incarnation == 2 for v in victims))
        await wait_until_idle(llm)


@pytest.mark.parametrize("signals", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victims", [("prefill-0",), ("decode-0",), ("prefill-0", "decode-0")])
async def test_workers_lost_at_random_times_cost_time_never_text(
    checkpoint: Path,
    one_workers: OneWorkers,
    scale: Scale,
    victims: tuple[str, ...],
    signals: signal.Signals,
    record: Callable[..., None],
) -> None:
    """Workers that are lost at random times cost time and never change the text. A stopped worker is killed
    after `stuck_after` seconds of silence, as requests wait for it."""
    if not scale.full:
        pytest.skip("with --full; tests/test_lifecycle_events.py has one death of each kind")
    rng = random.Random(scale.seed)
    requests = make_requests(16, scale.seed + 2)
    expected = await one_workers(requests)
    recovered = []
    for _ in range(ROUNDS):
        async with serving(checkpoint, pairs=1, stuck_after=4.0) as llm:
            working = asyncio.create_task(answers(llm, requests))
            await until(lambda: any(any(r.outputs.values()) for r in fleet(llm).requests.values()))
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            for victim in victims:
                os.kill(llm.process_id(victim), signals)
            lost_at = time.monotonic()
            assert await working == expected
            await until(lambda: all(fleet(llm).workers[v].incarnation == 2 for v in victims))
            await until(lambda: llm.health().ready)
            recovered.append(round(time.monotonic() - lost_at, 2))
            await wait_until_idle(llm)
    record(rounds=ROUNDS, streams=len(requests), recovery_seconds=recovered)


async def test_a_client_that_disconnects_frees_both_workers(checkpoint: Path) -> None:
    async with serving(checkpoint, pairs=1, kv_bytes_per_second=2e5) as llm:
        for leave_after in (0, 1, 5):
            params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
            seen = 0
            async with aclosing(llm.submit([7] * 100, params, request_id="cancelled")) as items:
                async for _ in items:
                    seen += 1
                    if seen > leave_after:
                        break
            assert seen == leave_after + 1, "it left in the middle"
            await wait_until_idle(llm)


async def test_tampered_transfer_reservations_are_refused_and_the_prompts_recomputed(
    checkpoint: Path,
    one_workers: OneWorkers,
    scale: Scale,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tampered transfer reservations are refused and the prompts recomputed: a forged, a stale, a duplicated
    and a truncated one."""
    requests = make_requests(16, scale.seed)
    expected = await one_workers(requests)
    async with serving(checkpoint, pairs=1) as llm:
        send = llm._runtime.driver._send
        remaining = [TAMPERED[kind] for kind in ("forged", "stale", "duplicated", "truncated")]

        async def tampered(command: Send) -> None:
            message = command.message
            if not isinstance(message, Push) or not remaining:
                await send(command)
                return
            for reservation in remaining.pop()(message.reservation):
                await send(Send(command.worker, Push(reservation)))

        monkeypatch.setattr(llm._runtime.driver, "_send", tampered)
        assert await answers(llm, requests) == expected
        assert not remaining
        await wait_until_idle(llm)


def test_each_role_has_its_own_limits(checkpoint: Path) -> None:
    overrides = {"pairs": 2, "max_chunk": 32, "prefill_max_chunk": 256, "decode_max_num_seqs": 7}
    settings = resolve(str(checkpoint), overrides | {"draft": "self:1"})
    prefill, decode = (worker_model(settings, name) for name in ("prefill-1", "decode-0"))
    assert (prefill.max_chunk, prefill.max_num_seqs) == (256, settings.model.max_num_seqs)
    assert (decode.max_chunk, decode.max_num_seqs) == (32, 7)
    assert (prefill.draft, decode.draft) == ("none", "self:1")
    for file in ("/models/draft", "/models/draft.gguf"):
        model = msgspec.structs.replace(settings.model, draft=file)
        prefill = worker_model(Settings(settings.name, model, settings.server), "prefill-0")
        assert prefill.draft == file, "the KV of a draft model is sent with the target's"
    unified_model = worker_model(resolve(str(checkpoint)), "unified-0")
    assert (unified_model.max_chunk, unified_model.threads) == (512, usable_processors().threads)


async def test_without_a_ready_pair_clients_wait_for_it(checkpoint: Path) -> None:
    requests = make_requests(2, 5)
    async with serving(checkpoint, pairs=1) as llm:
        expected = await answers(llm, requests)
        fleet(llm).workers["prefill-0"].recent_losses = 2  # Its restart is delayed by a second.
        for worker in ("prefill-0", "decode-0"):
            os.kill(llm.process_id(worker), signal.SIGKILL)
        await until(lambda: not any(worker.ready for worker in fleet(llm).workers.values()))
        health = llm.health()
        assert not health.ready
        assert re.search(r"prefill-0 is being restarted: .* SIGKILL", health.detail)
        assert health.retry_after is not None
        assert 0.5 < health.retry_after < 30.0
        assert await answers(llm, requests) == expected
        assert llm.incidents().deaths == 2


async def test_a_request_refused_by_one_worker_leaves_nothing_on_the_other(checkpoint: Path) -> None:
    """A request that one worker refuses leaves nothing on the other: with more choices than the decode worker
    runs at a time, it is refused, and the blocks of its prompt are free."""
    limits = {"prefill_max_num_seqs": 2, "decode_max_num_seqs": 1}
    params = SamplingParams(temperature=0, n=2, max_tokens=8, ignore_eos=True, logprobs=2)
    async with serving(checkpoint, pairs=1, **limits) as llm:
        for number in range(3):
            with pytest.raises(RequestError, match="n is 2, but at most 1"):
                await answers(llm, [([5 + number] * 40, params)])
        await wait_until_idle(llm)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pairs": 1, "prefill": 1}, "either pairs"),
        ({"prefill": 2}, "need each other"),
        ({"router": "magic"}, "choose one of flowguard"),
        ({"router": "random"}, "all requests go to the same worker or pair"),
        ({"router": "random", "pairs": 1}, "all requests go to the same worker or pair"),
        ({"workers": 0}, "no worker is left"),
        ({"router": "classes:20", "workers": 1, "prefill": 1, "decode": 2}, "classes cannot be divided"),
        ({"kv_transport": "nixl"}, "without pairs"),
        ({"prefill_max_chunk": 64}, "no such workers"),
    ],
)
def test_invalid_numbers_of_workers_are_refused(
    checkpoint: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve(str(checkpoint), settings)
