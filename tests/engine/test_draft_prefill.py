"""A prefill worker's draft model computes each chunk of a prompt before the target does; chunks of a prompt
stream are computed as they arrive. Its KV is sent under the same transfer reservation: the decode worker's
draft model does not compute the prompt again."""

from collections.abc import Callable, Sequence

import pytest

from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import DRAFT, DraftRequest
from streamserve.contracts.tree import TokenTree, root
from streamserve.engine.engine import Engine
from streamserve.engine.ports import EnginePorts
from streamserve.protocol.messages import Edit, Pushed, Reserved, Token
from streamserve.protocol.sampling import SamplingParams, SpeculationLimits
from streamserve.protocol.transfers import CacheAddress, Join, Push
from streamserve.simulate.executor import CostExecutor
from streamserve.simulate.transport import SimulatedTransport
from streamserve.speculation.controller import Speculation
from tests.engine.drive import VOCAB, assert_engine_empty, model_info, submit

CONFIG = EngineConfig(num_blocks=256, block_size=4, max_model_len=512, max_chunk=128)
PROMPT = [number % 90 for number in range(300)]


class RecordingDrafter:
    """A draft model that records its requests and drafts nothing. Its KV is the tokens themselves."""

    group = DRAFT

    def __init__(self, executor: CostExecutor) -> None:
        self.requests: list[DraftRequest] = []
        self._begun: list[DraftRequest] = []
        self._executor = executor

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self.requests += requests
        self._begun = list(requests)
        for request in requests:
            for position in range(request.computed, request.length):
                block, slot = divmod(position, CONFIG.block_size)
                self._executor._kv[DRAFT, request.blocks[block], slot] = request.tokens[position]

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        return {request.id: root(request.tokens[request.length - 1]) for request in self._begun}

    def release(self, ids: Sequence[int]) -> None:
        pass


Worker = tuple[Engine, RecordingDrafter, CostExecutor]


@pytest.fixture
def workers() -> tuple[Worker, Worker]:
    """Return a prefill worker and a decode worker."""
    pools: dict[str, CostExecutor] = {}

    def schedule(seconds: float, land: Callable[[], None]) -> None:
        land()

    def make_worker(name: str) -> Worker:
        executor = CostExecutor(CONFIG.num_blocks, CONFIG.block_size, VOCAB, lambda r, c: 1.0, groups=2)
        pools[name] = executor
        drafter = RecordingDrafter(executor)
        engine = Engine(
            CONFIG, model_info(512), executor, lambda: 0.0, drafter,
            Speculation(parse_policy("fixed:2"), lambda rows, kv: 1.0),
            EnginePorts(
                name, SimulatedTransport(executor, pools.get, schedule, 0.0),
                CacheAddress(name, 0, CONFIG.num_blocks, "fake"),
            ),
        )  # fmt: skip
        return engine, drafter, executor

    return make_worker("prefill"), make_worker("decode")


def hand_over(prefill: Worker, decode: Worker, **params: object) -> tuple[Push, Pushed, list[int]]:
    """Compute a request's prompt on one worker and send its KV to the other. Return the reservation, the
    notification and the first token."""
    sampling = SamplingParams(seed=1, max_tokens=3, **params)
    prefill[0].handle(submit("r", PROMPT, sampling, phase="prefill"))
    events = prefill[0].step()
    decode[0].handle(submit("r", PROMPT, sampling, phase="decode"))
    decode[0].step()
    (reserved,) = decode[0].transfers.take_updates()
    assert isinstance(reserved, Reserved)
    prefill[0].handle(Push(reserved.reservation))
    while prefill[0].has_work:
        events += prefill[0].step()
    (pushed,) = prefill[0].transfers.take_updates()
    assert isinstance(pushed, Pushed)
    prefill[0].step()
    assert_engine_empty(prefill[0])
    return Push(reserved.reservation), pushed, [event.token for event in events if isinstance(event, Token)]


def test_the_draft_models_kv_is_sent_under_the_same_reservation(workers: tuple[Worker, Worker]) -> None:
    prefill, decode = workers
    push, pushed, outputs = hand_over(prefill, decode)
    assert [request.length for request in prefill[1].requests] == [128, 256, 300]
    assert [request.computed for request in prefill[1].requests] == [0, 128, 256]
    assert pushed.groups == 2
    assert not pushed.error
    blocks = push.reservation.blocks
    received = decode[2]._kv[DRAFT, blocks].ravel()[: len(PROMPT)]
    assert received.tolist() == PROMPT

    decode[0].handle(Join("r", 0, push.reservation.id, {0: outputs}, {0: 0.0}, pushed.groups))
    decode[0].step()
    request = decode[1].requests[0]
    assert request.computed == len(PROMPT), "nothing is left to prefill on the decode worker"


def test_tokens_not_prefilled_are_prefilled_on_the_decode_worker(workers: tuple[Worker, Worker]) -> None:
    prefill, decode = workers
    push, _, outputs = hand_over(prefill, decode)
    decode[0].handle(Join("r", 0, push.reservation.id, {0: outputs}, {0: 0.0}, groups=1))
    decode[0].step()
    assert decode[1].requests[0].computed == 0


def test_requests_without_speculation_are_not_prefilled_by_the_draft_model(
    workers: tuple[Worker, Worker],
) -> None:
    prefill, decode = workers
    _, pushed, _ = hand_over(prefill, decode, speculation=SpeculationLimits(enabled=False))
    assert not prefill[1].requests
    assert pushed.groups == 1


def test_a_prompt_stream_is_read_while_it_arrives_and_not_while_its_client_waits(
    workers: tuple[Worker, Worker],
) -> None:
    prefill, drafter, _ = workers[0]
    sampling = SamplingParams(seed=1, max_tokens=3)
    prefill.handle(submit("r", PROMPT[:200], sampling, phase="prefill", open=True))
    while prefill.has_work:
        prefill.step()
    assert [request.length for request in drafter.requests] == [128, 199], (
        "the last token is computed when the stream is finished"
    )
    drafter.requests.clear()
    prefill.handle(Edit("r", 0, 1, 200, PROMPT[200:], True, sampling))
    events = prefill.step()
    assert [event for event in events if isinstance(event, Token)]
    assert not drafter.requests


def test_a_prefix_cached_on_both_workers_is_neither_prefilled_nor_sent_again(
    workers: tuple[Worker, Worker],
) -> None:
    prefill, decode = workers
    push, pushed, outputs = hand_over(prefill, decode)
    decode[0].handle(Join("r", 0, push.reservation.id, {0: outputs}, {0: 0.0}, pushed.groups))
    while decode[0].has_work:
        decode[0].step()
    prefill[1].requests.clear()
    push, pushed, _ = hand_over(prefill, decode)
    assert push.reservation.start == 296
    assert pushed.groups == 2
    assert sum(request.length - request.computed for request in prefill[1].requests) == 4
