"""Each scheduling order composes batches as specified, on a machine that computes 16 query tokens as fast as
one."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import get_args

import pytest

from streamserve.baselines.orders import ORDERS
from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.engine_config import EngineConfig
from streamserve.engine.engine import Engine
from streamserve.protocol.config import Order
from streamserve.protocol.messages import Event, Submit, Token
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.simulate.executor import CostExecutor
from streamserve.speculation.controller import Speculation
from tests.engine.drive import VOCAB, assert_engine_empty, model_info, submit


def seconds(query_tokens: int, kv_tokens: int) -> float:
    return 0.01 * max(1.0, query_tokens / 16)


@dataclass
class Run:
    """A run in virtual time: the time of each token, and the query tokens of each step."""

    times: dict[str, list[float]] = field(default_factory=dict)
    query_tokens: list[int] = field(default_factory=list)

    def tpot(self, request: str) -> float:
        times = self.times[request]
        return (times[-1] - times[0]) / (len(times) - 1)


def run(requests: list[Submit], **settings) -> Run:
    """Submit every request at its arrival, and run until all have finished."""
    settings = {"num_blocks": 512, "block_size": 4, "max_model_len": 1024} | settings
    config = EngineConfig(**settings)
    executor = CostExecutor(config.num_blocks, config.block_size, VOCAB, seconds)
    now = [0.0]
    speculation = Speculation(parse_policy("off"), seconds)
    engine = Engine(config, model_info(1024), executor, lambda: now[0], None, speculation, orders=ORDERS)
    result, upcoming = Run(), sorted(requests, key=lambda submitted: submitted.arrival)
    while upcoming or engine.has_work:
        while upcoming and upcoming[0].arrival <= now[0]:
            engine.handle(upcoming.pop(0))
        executor.seconds = 0.0
        events: list[Event] = engine.step() if engine.has_work else []
        now[0] += executor.seconds or 0.001
        result.query_tokens.append(round(executor.seconds / 0.01 * 16))
        for event in events:
            if isinstance(event, Token):
                result.times.setdefault(event.request, []).append(now[0])
    assert_engine_empty(engine)
    return result


def make_submit(name: str, prompt: int, tokens: int, arrival: float = 0.0, **slo: float) -> Submit:
    params = SamplingParams(temperature=0, max_tokens=tokens, slo=Slo(**slo))
    first = sum(map(ord, name))  # no two share a prefix
    return submit(name, [(first + 7 * i) % VOCAB for i in range(prompt)], params, arrival=arrival)


def test_the_setting_lists_all_orders() -> None:
    assert get_args(Order) == tuple(ORDERS)


def test_a_target_for_the_first_token_is_met_among_those_without() -> None:
    """A latency target for the first token is met among requests without targets: 2400 tokens wait, 1.5
    seconds of work, when prompts with a strict and with a lax target arrive."""
    others = [make_submit(f"c{i}", 600, 4) for i in range(4)]
    urgent = make_submit("urgent", 160, 4, arrival=0.05, ttft_ms=500.0)
    later = make_submit("later", 160, 4, arrival=0.04, ttft_ms=900.0)
    slo = run([*others, urgent, later])
    blind = run([*others, urgent, later], order="chunked")
    assert slo.times["urgent"][0] <= 0.05 + 0.5 < blind.times["urgent"][0]
    assert slo.times["later"][0] <= 0.04 + 0.9 < blind.times["later"][0]


def test_prompts_do_not_break_a_target_for_further_tokens() -> None:
    strict = make_submit("strict", 8, 100, tpot_ms=12.0)
    others = [make_submit(f"c{i}", 600, 4, arrival=0.1) for i in range(4)]
    assert run([strict, *others]).tpot("strict") <= 0.012
    assert run([strict, *others], order="chunked").tpot("strict") > 0.015


def test_a_prompt_without_a_target_makes_progress_among_strict_ones() -> None:
    """A prompt without a target waits a second so that strict requests meet their targets; then it is aged
    in, chunk by chunk."""
    strict = [make_submit(f"s{i}", 8, 400, tpot_ms=10.5) for i in range(16)]
    patient = make_submit("patient", 100, 2, arrival=0.05)
    result = run([*strict, patient])
    assert result.times["patient"][0] < result.times["s0"][-1]


def test_under_overload_some_requests_meet_their_targets_and_the_others_are_served_later() -> None:
    """Under twice the load that the machine can serve, some requests meet their targets and the others are
    served later. In order of arrival, no request would meet its target."""
    others = [
        make_submit(f"c{i:02}", 8, 40, arrival=0.01 * i, tpot_ms=12.0, ttft_ms=200.0) for i in range(40)
    ]

    def attained(result: Run) -> int:
        delays = {
            submitted.request: result.times[submitted.request][0] - submitted.arrival for submitted in others
        }
        return sum(result.tpot(name) <= 0.012 and wait <= 0.2 for name, wait in delays.items())

    slo, blind = run(others), run(others, order="chunked")
    assert attained(blind) == 0
    assert attained(slo) >= 12
    assert all(len(times) == 40 for times in slo.times.values()), "all are served"


def test_prompts_without_targets_do_not_wait_for_each_other() -> None:
    others = [make_submit(f"c{i:02}", 8, 40) for i in range(40)]
    slo, chunked = run(others), run(others, order="chunked")
    first = [max(times[0] for times in result.times.values()) for result in (slo, chunked)]
    assert first[0] <= first[1] + 0.1


def test_a_request_that_missed_its_targets_delays_no_other() -> None:
    """A request with an infeasible target delays no other request, whose targets are feasible."""
    infeasible = make_submit("infeasible", 8, 100, tpot_ms=1.0)
    others = [make_submit(f"o{i}", 8, 40, arrival=0.1, tpot_ms=20.0, ttft_ms=300.0) for i in range(4)]
    result = run([infeasible, *others])
    assert all(result.times[submitted.request][0] <= 0.1 + 0.3 for submitted in others)
    assert all(result.tpot(submitted.request) <= 0.02 for submitted in others)


def test_prefill_first_decodes_all_that_have_begun_at_once() -> None:
    result = run([make_submit(f"c{i}", 8, 20) for i in range(8)], order="prefill-first")
    times = list(result.times.values())
    assert all(submitted[1:] == times[0][1:] for submitted in times)


def test_prefill_first_decodes_nothing_in_a_batch_with_a_prompt() -> None:
    short, long = make_submit("short", 8, 40), make_submit("long", 600, 2, arrival=0.1)
    settings = {"max_num_batched_tokens": 64, "max_chunk": 64}
    pause = {}
    for order in ("prefill-first", "chunked"):
        result = run([short, long], order=order, **settings)
        times = result.times["short"]
        pause[order] = max(after - before for before, after in pairwise(times))
        if order == "prefill-first":
            assert not any(before < result.times["long"][0] - 0.001 for before in times if before > 0.15)
    assert pause["prefill-first"] > 0.3 > 0.1 > pause["chunked"]


@pytest.mark.parametrize("order", ["fcfs", "stta"])
def test_capped_batches_stay_small_while_a_strict_request_decodes(order: str) -> None:
    strict = make_submit("strict", 8, 50, tpot_ms=20.0)
    others = [make_submit(f"c{i:02}", 16, 60, arrival=0.02) for i in range(48)]
    result = run([strict, *others], order=order)
    capped = result.query_tokens[2:50]
    assert max(capped) == 32
    assert max(result.query_tokens[52:]) > 40
    assert result.tpot("strict") <= 0.02 < run([strict, *others], order="chunked").tpot("strict")


def test_a_fixed_share_of_the_step() -> None:
    decoding, long = make_submit("decoding", 8, 100), make_submit("long", 600, 2, arrival=0.1)
    settings = {"max_num_batched_tokens": 64, "max_chunk": 64}
    assert max(run([decoding, long], prefill_share=0.25, **settings).query_tokens) == 1 + 16
    assert max(run([decoding, long], prefill_share=1.0, **settings).query_tokens) == 64


def test_requests_that_wait_for_a_shared_prefix_take_no_tokens_from_the_one_that_computes_it() -> None:
    head, params = list(range(80)) * 5, SamplingParams(temperature=0, max_tokens=2)
    first = submit("long", [*head, *range(90, 96)] * 2, params)
    others = [submit(f"r{n}", [*head, n], params, arrival=0.001) for n in range(20)]
    result = run([first, *others], max_num_batched_tokens=64, max_chunk=64)
    needed = seconds(812 + 20, 0)
    assert max(times[0] for times in result.times.values()) < 1.5 * needed


def test_requests_that_wait_for_memory_take_no_tokens_from_the_one_that_holds_it() -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    first = submit("long", [number % 90 for number in range(380)], params)
    others = [submit(f"r{n}", [n, 1, 2] * 10, params, arrival=0.001) for n in range(20)]
    result = run([first, *others], num_blocks=100, max_num_batched_tokens=64, max_chunk=64)
    needed = seconds(380 + 20 * 30, 0)
    assert max(times[0] for times in result.times.values()) < 1.5 * needed


def test_cached_tokens_of_a_chat_do_not_count_towards_the_budget() -> None:
    """Only uncached tokens count towards the budget: four chats with the same long prefix continue in one
    step."""
    head = [7 * i % VOCAB for i in range(800)]
    params = SamplingParams(temperature=0, max_tokens=8)
    first = submit("head", head, params, arrival=0.0)
    turns = [submit(f"turn-{i}", [*head, 1 + i, 2, 3, 4], params, arrival=10.0) for i in range(4)]
    result = run([first, *turns], num_blocks=1024, block_size=4)
    times = [result.times[f"turn-{i}"] for i in range(4)]
    assert all(submitted[0] < 10.05 for submitted in times)
    assert len({submitted[0] for submitted in times}) == 1
