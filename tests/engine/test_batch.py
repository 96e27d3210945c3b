"""Steps in time: what each order puts into them, on a machine that computes 16 rows as fast as one."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import get_args

import pytest

from streamserve.engine.engine import Engine
from streamserve.protocol.config import EngineConfig, Order
from streamserve.protocol.messages import Event, Submit, Token
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.scheduling.ordering import ORDERS
from streamserve.simulate.executor import CostExecutor
from streamserve.speculation.controller import Speculation
from streamserve.speculation.policies import parse_policy
from tests.engine.drive import VOCAB, assert_engine_empty, model_info, submit


def seconds(rows: int, kv_tokens: int) -> float:
    return 0.01 * max(1.0, rows / 16)


@dataclass
class Played:
    """A run in virtual time: when each token came, and how many rows each step had."""

    times: dict[str, list[float]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)

    def tpot(self, request: str) -> float:
        times = self.times[request]
        return (times[-1] - times[0]) / (len(times) - 1)


def play(requests: list[Submit], **settings) -> Played:
    """Every request at its arrival, until all have ended."""
    settings = {"num_blocks": 512, "block_size": 4, "max_model_len": 1024} | settings
    config = EngineConfig(**settings)
    executor = CostExecutor(config.num_blocks, config.block_size, VOCAB, seconds)
    now = [0.0]
    speculation = Speculation(parse_policy("off"), seconds)
    engine = Engine(config, model_info(1024), executor, lambda: now[0], speculation=speculation)
    played, coming = Played(), sorted(requests, key=lambda one: one.arrival)
    while coming or engine.has_work:
        while coming and coming[0].arrival <= now[0]:
            engine.handle(coming.pop(0))
        executor.seconds = 0.0
        events: list[Event] = engine.step() if engine.has_work else []
        now[0] += executor.seconds or 0.001
        played.rows.append(round(executor.seconds / 0.01 * 16))
        for event in events:
            if isinstance(event, Token):
                played.times.setdefault(event.request, []).append(now[0])
    assert_engine_empty(engine)
    return played


def ask(name: str, prompt: int, tokens: int, arrival: float = 0.0, **slo: float) -> Submit:
    params = SamplingParams(temperature=0, max_tokens=tokens, slo=Slo(**slo))
    first = sum(map(ord, name))  # no two begin alike
    return submit(name, [(first + 7 * i) % VOCAB for i in range(prompt)], params, arrival=arrival)


def test_settings_name_the_same_orders() -> None:
    assert get_args(Order) == ORDERS


def test_a_target_for_the_first_token_is_met_among_those_without() -> None:
    """2400 tokens wait already, 1.5 seconds of work; an urgent prompt comes, and one in less of a hurry."""
    crowd = [ask(f"c{i}", 600, 4) for i in range(4)]
    urgent = ask("urgent", 160, 4, arrival=0.05, ttft_ms=500.0)
    later = ask("later", 160, 4, arrival=0.04, ttft_ms=900.0)
    slo = play([*crowd, urgent, later])
    blind = play([*crowd, urgent, later], order="chunked")
    assert slo.times["urgent"][0] <= 0.05 + 0.5 < blind.times["urgent"][0]
    assert slo.times["later"][0] <= 0.04 + 0.9 < blind.times["later"][0]


def test_prompts_do_not_break_a_target_for_further_tokens() -> None:
    strict = ask("strict", 8, 100, tpot_ms=12.0)
    crowd = [ask(f"c{i}", 600, 4, arrival=0.1) for i in range(4)]
    assert play([strict, *crowd]).tpot("strict") <= 0.012
    assert play([strict, *crowd], order="chunked").tpot("strict") > 0.015


def test_a_prompt_without_a_target_moves_on_beside_strict_ones() -> None:
    """It waits a second for their sake, then it begins at their cost, piece by piece."""
    strict = [ask(f"s{i}", 8, 400, tpot_ms=10.5) for i in range(16)]
    patient = ask("patient", 100, 2, arrival=0.05)
    played = play([*strict, patient])
    assert played.times["patient"][0] < played.times["s0"][-1]


def test_of_more_than_can_be_kept_on_target_some_are_and_the_rest_is_served_later() -> None:
    """Two machines' work at once: in turn of arrival nobody would be on target."""
    crowd = [ask(f"c{i:02}", 8, 40, arrival=0.01 * i, tpot_ms=12.0, ttft_ms=200.0) for i in range(40)]

    def attained(played: Played) -> int:
        waits = {one.request: played.times[one.request][0] - one.arrival for one in crowd}
        return sum(played.tpot(name) <= 0.012 and wait <= 0.2 for name, wait in waits.items())

    slo, blind = play(crowd), play(crowd, order="chunked")
    assert attained(blind) == 0
    assert attained(slo) >= 12
    assert all(len(times) == 40 for times in slo.times.values()), "nobody is left out"


def test_prompts_without_targets_do_not_wait_for_each_other() -> None:
    crowd = [ask(f"c{i:02}", 8, 40) for i in range(40)]
    slo, chunked = play(crowd), play(crowd, order="chunked")
    first = [max(times[0] for times in played.times.values()) for played in (slo, chunked)]
    assert first[0] <= first[1] + 0.1


def test_who_cannot_meet_its_targets_any_more_holds_nobody_up() -> None:
    """A target that this machine never meets, beside those that it does."""
    infeasible = ask("hopeless", 8, 100, tpot_ms=1.0)
    others = [ask(f"o{i}", 8, 40, arrival=0.1, tpot_ms=20.0, ttft_ms=300.0) for i in range(4)]
    played = play([infeasible, *others])
    assert all(played.times[one.request][0] <= 0.1 + 0.3 for one in others)
    assert all(played.tpot(one.request) <= 0.02 for one in others)


def test_prefill_first_decodes_all_that_have_begun_at_once() -> None:
    played = play([ask(f"c{i}", 8, 20) for i in range(8)], order="prefill-first")
    times = list(played.times.values())
    assert all(one[1:] == times[0][1:] for one in times)


def test_prefill_first_decodes_nothing_beside_a_prompt() -> None:
    short, long = ask("short", 8, 40), ask("long", 600, 2, arrival=0.1)
    settings = {"max_num_batched_tokens": 64, "max_chunk": 64}
    pause = {}
    for order in ("prefill-first", "chunked"):
        played = play([short, long], order=order, **settings)
        times = played.times["short"]
        pause[order] = max(after - before for before, after in pairwise(times))
        if order == "prefill-first":
            assert not any(before < played.times["long"][0] - 0.001 for before in times if before > 0.15)
    assert pause["prefill-first"] > 0.3 > 0.1 > pause["chunked"]


@pytest.mark.parametrize("order", ["fcfs", "stta"])
def test_capped_batches_stay_small_while_somebody_strict_decodes(order: str) -> None:
    strict = ask("strict", 8, 50, tpot_ms=20.0)
    crowd = [ask(f"c{i:02}", 16, 60, arrival=0.02) for i in range(48)]
    played = play([strict, *crowd], order=order)
    during = played.rows[2:50]
    assert max(during) == 32
    assert max(played.rows[52:]) > 40
    assert played.tpot("strict") <= 0.02 < play([strict, *crowd], order="chunked").tpot("strict")


def test_a_fixed_share_of_the_step() -> None:
    decoding, long = ask("decoding", 8, 100), ask("long", 600, 2, arrival=0.1)
    settings = {"max_num_batched_tokens": 64, "max_chunk": 64}
    assert max(play([decoding, long], prefill_share=0.25, **settings).rows) == 1 + 16
    assert max(play([decoding, long], prefill_share=1.0, **settings).rows) == 64


def test_who_waits_for_a_shared_head_takes_no_rows_from_who_computes_it() -> None:
    head, params = list(range(80)) * 5, SamplingParams(temperature=0, max_tokens=2)
    first = submit("long", [*head, *range(90, 96)] * 2, params)
    others = [submit(f"r{n}", [*head, n], params, arrival=0.001) for n in range(20)]
    played = play([first, *others], max_num_batched_tokens=64, max_chunk=64)
    needed = seconds(812 + 20, 0)
    assert max(times[0] for times in played.times.values()) < 1.5 * needed


def test_who_waits_for_memory_takes_no_rows_from_who_holds_it() -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    first = submit("long", [number % 90 for number in range(380)], params)
    others = [submit(f"r{n}", [n, 1, 2] * 10, params, arrival=0.001) for n in range(20)]
    played = play([first, *others], num_blocks=100, max_num_batched_tokens=64, max_chunk=64)
    needed = seconds(380 + 20 * 30, 0)
    assert max(times[0] for times in played.times.values()) < 1.5 * needed


def test_a_turn_of_a_chat_waits_for_none_of_what_is_known_already() -> None:
    """What counts is what is left to compute: four chats with the same long head go on in one step."""
    head = [7 * i % VOCAB for i in range(800)]
    params = SamplingParams(temperature=0, max_tokens=8)
    first = submit("head", head, params, arrival=0.0)
    turns = [submit(f"turn-{i}", [*head, 1 + i, 2, 3, 4], params, arrival=10.0) for i in range(4)]
    played = play([first, *turns], num_blocks=1024, block_size=4)
    times = [played.times[f"turn-{i}"] for i in range(4)]
    assert all(one[0] < 10.05 for one in times)
    assert len({one[0] for one in times}) == 1
