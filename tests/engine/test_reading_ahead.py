"""A draft model reads a prompt while another worker computes its KV for the target."""

from collections.abc import Sequence

import pytest

from streamserve.engine.engine import Engine
from streamserve.engine.plan import DRAFT, DraftRequest
from streamserve.engine.speculation import Speculation
from streamserve.policy.speculation import parse_policy
from streamserve.policy.tree import TokenTree, root
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.messages import Pushed, Reserved
from streamserve.protocol.sampling import SamplingParams, SpeculationLimits
from streamserve.protocol.tickets import CacheAddress, Join, Release
from streamserve.simulate.executor import CostExecutor
from tests.engine.drive import VOCAB, assert_engine_empty, model_info, submit

CONFIG = EngineConfig(num_blocks=256, block_size=4, max_model_len=512, max_chunk=128)
PROMPT = [number % 90 for number in range(300)]


class Reader:
    """A draft model that notes what it is asked, and guesses nothing."""

    plane = DRAFT

    def __init__(self) -> None:
        self.asked: list[DraftRequest] = []
        self._begun: list[DraftRequest] = []

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self.asked += requests
        self._begun = list(requests)

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        return {one.id: root(one.new_tokens[-1]) for one in self._begun}

    def release(self, ids: Sequence[int]) -> None:
        pass


def decode_worker(policy: str = "fixed:2") -> tuple[Engine, Reader]:
    executor = CostExecutor(CONFIG.num_blocks, CONFIG.block_size, VOCAB, lambda rows, context: 1.0)
    reader = Reader()
    address = CacheAddress("decode", 0, CONFIG.num_blocks, "pretended")
    speculation = Speculation(parse_policy(policy), lambda rows, kv: 1.0)
    engine = Engine(
        CONFIG, model_info(512), executor, lambda: 0.0, reader, speculation, cache=address, name="decode"
    )
    return engine, reader


def reserve(engine: Engine, **params: object) -> str:
    """A request whose prompt comes from elsewhere has got its blocks; returns its ticket."""
    engine.handle(submit("r", PROMPT, SamplingParams(seed=1, max_tokens=3, **params), phase="decode"))
    engine.step()
    (news,) = engine.exchange.news()
    assert isinstance(news, Reserved)
    return news.ticket.id


def test_the_prompt_is_read_in_chunks_before_its_kv_has_come() -> None:
    engine, reader = decode_worker()
    ticket = reserve(engine)
    while engine.has_work:
        assert not engine.step()
        assert not engine.stalled
    assert [len(one.new_tokens) for one in reader.asked] == [128, 128, 44]
    assert [one.computed for one in reader.asked] == [0, 128, 256]
    engine.handle(Join("r", 0, ticket, {0: [7]}, {0: 0.0}))
    engine.step()
    first = reader.asked[3]
    assert (first.computed, first.new_tokens) == (300, [7]), "nothing is left to read when it decodes"


def test_who_decodes_waits_for_little_of_it() -> None:
    engine, reader = decode_worker()
    engine.handle(submit("other", [1, 2, 3], SamplingParams(seed=2, max_tokens=40)))
    engine.step()
    engine.step()
    reader.asked.clear()
    reserve(engine)
    while engine.scheduler.of("other"):
        engine.step()
    read = [one for one in reader.asked if not one.depth]
    assert sum(len(one.new_tokens) for one in read) == 300
    assert max(len(one.new_tokens) for one in read) == 64


@pytest.mark.parametrize(("policy", "enabled"), [("off", True), ("fixed:2", False)])
def test_nothing_is_read_for_who_is_not_guessed_for(policy: str, enabled: bool) -> None:
    engine, reader = decode_worker(policy)
    reserve(engine, speculation=SpeculationLimits(enabled=enabled))
    assert not engine.has_work
    assert not reader.asked


def test_what_was_read_of_a_prompt_that_never_came_is_dropped() -> None:
    engine, reader = decode_worker()
    ticket = reserve(engine)
    engine.step()
    assert reader.asked
    engine.handle(Release(ticket))
    assert not [news for news in engine.exchange.news() if isinstance(news, Pushed)]
    while engine.has_work:
        engine.step()
    assert_engine_empty(engine)
