"""The fleet tracks its workers for routing: cached prefixes, queued prompts, prefill progress."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.fleet.admission import WaitingPrompts
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Close, Open, Send, WorkerMessage
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.placement import CONSIDERED, PrefixView
from streamserve.fleet.prompt_queue import Queued
from streamserve.fleet.worker_state import WorkerState, pairs, unified
from streamserve.protocol.messages import Cached, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.scheduling import prefix
from streamserve.scheduling.prefix import block_hash, root_hash
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import model_info
from tests.fleet.fakes import READY, W, send_events, started
from tests.simulate.chat import ENGINE, FIRST, assert_both_answered

NAMES = [bytes([number]) * 16 for number in range(4)]


def test_cache_reports_correct_the_estimates() -> None:
    view = PrefixView()
    view.learn("w", NAMES[:2], 9)
    assert view.cached("w", NAMES) == 2
    view.update("w", Cached(NAMES[2:3], NAMES[1:2]), 9)
    assert view.cached("w", NAMES) == 1, "the second block is no longer cached"
    view.update("w", Cached(NAMES[1:2], []), 9)
    assert view.cached("w", NAMES) == 3
    assert view.pending("w", NAMES[:3]) == 1, "the first block has not been reported"
    view.update("w", Cached(NAMES[:1], []), 9)
    view.learn("w", NAMES[:2], 9)
    assert view.pending("w", NAMES[:3]) == 0, "an estimate does not undo a report"
    view.forget("w")
    assert view.cached("w", NAMES) == 0


def test_the_prefix_view_of_a_pair_matches_its_prefix_indexes() -> None:
    """The fleet's view of a pair's prefixes equals both workers' prefix indexes after two turns."""
    simulation = Simulation(
        FleetConfig(topology=pairs(1)),
        WorkerSpec(ENGINE, model_info(400), lambda rows, context: 0.01 + rows * 0.001),
    )
    other = Open("other", [8] * 300, FIRST.params)  # replaces the first request's blocks
    assert_both_answered(simulation, other)
    view = simulation.fleet.placement.view
    for name, worker in simulation.workers.items():
        known = set(worker.engine.scheduler.tables.pool._cached)
        assert set(view._blocks[name]) == known
        assert known


def test_updates_of_an_ended_worker_process_are_ignored() -> None:
    fleet = Fleet(FleetConfig(topology=pairs(1)))
    fleet.start(0.0)
    fleet.handle(WorkerMessage("prefill-0", 7, Cached(NAMES, [])), 0.0)
    assert fleet.placement.view.cached("prefill-0", NAMES) == 0


def test_a_worker_has_been_computing_since_the_queue_began_or_the_last_first_token() -> None:
    worker = WorkerState()
    worker.queue("a", Queued(100), 1.0)
    worker.queue("b", Queued(200, deadline=5.0), 2.0)
    load = worker.load("w", 3.0)
    assert (load.queued, load.queued_tokens, load.timely_tokens, load.busy) == (2, 300, 300, 2.0)
    worker.started("a", 4.0)
    assert worker.load("w", 4.5).busy == 0.5
    load = worker.load("w", 6.0)
    assert (load.queued_tokens, load.timely_tokens, load.busy) == (200, 0, 0.0), "too late for the second"


def test_of_many_workers_some_are_considered_and_those_that_have_the_prompt() -> None:
    fleet = Fleet(FleetConfig(topology=unified(200)))
    fleet.start(0.0)
    for worker in fleet.workers:
        fleet.handle(WorkerMessage(worker, 1, READY), 0.0)
    prompts = [[number] * 8 for number in range(400)]
    chosen = [_routed(fleet, f"first-{number}", prompt) for number, prompt in enumerate(prompts)]
    assert len(set(chosen)) == 200, "all workers are chosen"
    assert {len(record.candidates) for record in fleet.placement.recent} == {CONSIDERED}
    for number in range(400):
        fleet.handle(Close(f"first-{number}"), 0.0)
    again = [_routed(fleet, f"again-{number}", prompt) for number, prompt in enumerate(prompts[:50])]
    assert again == chosen[:50], "requests go where their blocks are"


def _routed(fleet: Fleet, name: str, prompt: list[int]) -> str:
    opened = fleet.handle(Open(name, prompt, SamplingParams(seed=1, max_tokens=4)), 0.0)
    (sent,) = (command for command in opened if isinstance(command, Send))
    return sent.worker


@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(0, 99)), max_size=30))
def test_the_sum_of_waiting_prompts_is_that_of_their_sizes(changes: list[tuple[str, int | None]]) -> None:
    waiting, sizes = WaitingPrompts(), dict[str, int]()
    for name, tokens in changes:
        if tokens is None:
            waiting.discard(name)
            sizes.pop(name, None)
        else:
            waiting.add(name, tokens)
            sizes[name] = tokens
    assert (len(waiting), waiting.tokens) == (len(sizes), sum(sizes.values()))


def test_a_prompt_is_hashed_once_for_all_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is hashed once for all its choices. When its choices end, the blocks of prompt and outputs are
    learned, with one hash for each block."""
    hashed: list[list[int]] = []

    def counted(parent: bytes, tokens: list[int]) -> bytes:
        hashed.append(tokens)
        return block_hash(parent, tokens)

    monkeypatch.setattr(prefix, "block_hash", counted)
    choices, blocks, size = 32, 50, READY.block_size
    prompt = list(range(1, blocks * size + 2))  # one token more, with which the outputs begin a block
    fleet = started()
    fleet.handle(WorkerMessage(W, 1, msgspec.structs.replace(READY, num_blocks=200)), 0.0)
    fleet.handle(Open("r", prompt, SamplingParams(seed=1, max_tokens=size, n=choices)), 0.0)
    request = fleet.dispatcher.requests["r"]
    last = size - 1
    tokens = [
        Token("r", request.attempt, choice, index, 100, finish="length" if index == last else None)
        for choice in range(choices)
        for index in range(size)
    ]
    hashed.clear()
    send_events(fleet, *tokens)
    assert "r" not in fleet.dispatcher.requests, "it has ended"
    assert len(hashed) == blocks + choices
    one = prompt + [100] * (size - 1)
    hashes: list[bytes] = []
    root = root_hash(READY.model.kv_name, "", "")
    prefix.extend_hashes(hashes, root, one, size, len(one))
    assert fleet.placement.view.cached(W, hashes) == len(hashes) == blocks + 1
