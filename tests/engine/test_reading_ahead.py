"""A draft model beside the prefill worker reads each chunk of a prompt before the target computes it, so that
its KV goes into the same ticket, and nobody reads a prompt where it is decoded."""

from collections.abc import Callable, Sequence

import pytest

from streamserve.engine.engine import Engine
from streamserve.engine.plan import DRAFT, DraftRequest
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.messages import Pushed, Reserved, Token
from streamserve.protocol.sampling import SamplingParams, SpeculationLimits
from streamserve.protocol.tickets import CacheAddress, Join, Push
from streamserve.simulate.executor import CostExecutor
from streamserve.simulate.transport import SimulatedTransport
from streamserve.speculation.controller import Speculation
from streamserve.speculation.policies import parse_policy
from streamserve.speculation.tree import TokenTree, root
from tests.engine.drive import VOCAB, assert_engine_empty, model_info, submit

CONFIG = EngineConfig(num_blocks=256, block_size=4, max_model_len=512, max_chunk=128)
PROMPT = [number % 90 for number in range(300)]


class Reader:
    """A draft model that notes what it is asked, and guesses nothing. What it reads is its plane's KV."""

    plane = DRAFT

    def __init__(self, executor: CostExecutor) -> None:
        self.asked: list[DraftRequest] = []
        self._begun: list[DraftRequest] = []
        self._executor = executor
        self._known: dict[int, list[int]] = {}

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self.asked += requests
        self._begun = list(requests)
        for one in requests:
            tokens = self._known.setdefault(one.id, [])
            tokens[one.keep :] = one.new_tokens
            for position in range(one.computed, len(tokens)):
                block, slot = divmod(position, CONFIG.block_size)
                self._executor._kv[DRAFT, one.blocks[block], slot] = tokens[position]

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        return {one.id: root(one.new_tokens[-1]) for one in self._begun}

    def release(self, ids: Sequence[int]) -> None:
        pass


Half = tuple[Engine, Reader, CostExecutor]


@pytest.fixture
def halves() -> tuple[Half, Half]:
    """A prefill and a decode worker."""
    pools: dict[str, CostExecutor] = {}

    def later(seconds: float, land: Callable[[], None]) -> None:
        land()

    def half(name: str) -> Half:
        executor = CostExecutor(CONFIG.num_blocks, CONFIG.block_size, VOCAB, lambda r, c: 1.0, planes=2)
        pools[name] = executor
        reader = Reader(executor)
        engine = Engine(
            CONFIG, model_info(512), executor, lambda: 0.0, reader,
            Speculation(parse_policy("fixed:2"), lambda rows, kv: 1.0),
            transport=SimulatedTransport(executor, pools.get, later, 0.0),
            cache=CacheAddress(name, 0, CONFIG.num_blocks, "pretended"), name=name,
        )  # fmt: skip
        return engine, reader, executor

    return half("prefill"), half("decode")


def hand_over(prefill: Half, decode: Half, **params: object) -> tuple[Push, Pushed, list[int]]:
    """A request's prompt is computed by one and moved to the other: ticket, what was told, the first
    token."""
    wanted = SamplingParams(seed=1, max_tokens=3, **params)
    prefill[0].handle(submit("r", PROMPT, wanted, phase="prefill"))
    events = prefill[0].step()
    decode[0].handle(submit("r", PROMPT, wanted, phase="decode"))
    decode[0].step()
    (reserved,) = decode[0].exchange.news()
    assert isinstance(reserved, Reserved)
    prefill[0].handle(Push(reserved.ticket))
    while prefill[0].has_work:
        events += prefill[0].step()
    (pushed,) = prefill[0].exchange.news()
    assert isinstance(pushed, Pushed)
    prefill[0].step()
    assert_engine_empty(prefill[0])
    return Push(reserved.ticket), pushed, [event.token for event in events if isinstance(event, Token)]


def test_the_draft_models_kv_goes_into_the_same_ticket(halves: tuple[Half, Half]) -> None:
    prefill, decode = halves
    push, pushed, first = hand_over(prefill, decode)
    assert [len(one.new_tokens) for one in prefill[1].asked] == [128, 128, 44]
    assert [one.computed for one in prefill[1].asked] == [0, 128, 256]
    assert pushed.planes == 2
    assert not pushed.error
    blocks = push.ticket.blocks
    there = decode[2]._kv[DRAFT, blocks].ravel()[: len(PROMPT)]
    assert there.tolist() == PROMPT

    decode[0].handle(Join("r", 0, push.ticket.id, {0: first}, {0: 0.0}, pushed.planes))
    decode[0].step()
    one = decode[1].asked[0]
    assert one.computed == len(PROMPT), "where it is decoded there is nothing left to read"


def test_what_was_not_read_is_read_where_it_is_decoded(halves: tuple[Half, Half]) -> None:
    prefill, decode = halves
    push, _, first = hand_over(prefill, decode)
    decode[0].handle(Join("r", 0, push.ticket.id, {0: first}, {0: 0.0}, planes=1))
    decode[0].step()
    assert decode[1].asked[0].computed == 0


def test_nobody_reads_for_who_does_not_want_guesses(halves: tuple[Half, Half]) -> None:
    prefill, decode = halves
    _, pushed, _ = hand_over(prefill, decode, speculation=SpeculationLimits(enabled=False))
    assert not prefill[1].asked
    assert pushed.planes == 1


def test_a_prefix_that_both_have_is_neither_read_nor_sent_again(halves: tuple[Half, Half]) -> None:
    prefill, decode = halves
    push, pushed, first = hand_over(prefill, decode)
    decode[0].handle(Join("r", 0, push.ticket.id, {0: first}, {0: 0.0}, pushed.planes))
    while decode[0].has_work:
        decode[0].step()
    prefill[1].asked.clear()
    push, pushed, _ = hand_over(prefill, decode)
    assert push.ticket.have == 296
    assert pushed.planes == 2
    assert sum(len(one.new_tokens) - one.computed for one in prefill[1].asked) == 4
