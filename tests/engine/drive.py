"""Run an engine on the fake model until it has no work, and check that it has freed everything."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from streamserve.baselines.orders import ORDERS
from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import Drafter
from streamserve.engine.engine import Engine
from streamserve.engine.ports import NO_PORTS, EnginePorts
from streamserve.protocol.messages import (
    Event,
    Finished,
    ModelInfo,
    OutputWithdrawn,
    Pooled,
    Progress,
    PromptLogprobs,
    Submit,
    Token,
)
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.drafter import SimulatedDrafter
from streamserve.simulate.executor import CostExecutor, next_token, shift_of
from streamserve.speculation.controller import Speculation

VOCAB = 97
EOS = 96


def model_info(max_model_len: int, eos: tuple[int, ...] = ()) -> ModelInfo:
    return ModelInfo(
        architecture="fake", parameters=0, vocab_size=VOCAB, max_model_len=max_model_len,
        eos_token_ids=eos, weight_bytes=0, dtype="none", row_invariant=True, fingerprint="fake",
        backend="fake",
    )  # fmt: skip


def make_engine(
    config: EngineConfig,
    drafter: Drafter | None = None,
    eos: tuple[int, ...] = (),
    speculation: Speculation | None = None,
    draft_model: float | None = None,
    wrap: Callable[[CostExecutor], Any] = lambda executor: executor,
    ports: EnginePorts = NO_PORTS,
) -> Engine:
    """Make an engine that checks its invariants after every step. `draft_model`: acceptance rate of a drafter
    with KV; a fifth of its trees are late. `wrap` takes the executor and returns an executor that the engine
    calls instead."""
    groups = 1 if draft_model is None else 2
    executor = CostExecutor(
        config.num_blocks, config.block_size, VOCAB, lambda rows, context: 1.0, groups, config.swap_blocks
    )
    config = replace(config, check=True)
    if draft_model is not None:
        drafter = SimulatedDrafter(executor, draft_model, late=0.2)
    ticks = itertools.count()
    speculation = speculation or Speculation(parse_policy("fixed:8"), lambda rows, kv_tokens: 1.0)
    clock = lambda: float(next(ticks))  # noqa: E731
    model = model_info(config.max_model_len, eos)
    return Engine(config, model, wrap(executor), clock, drafter, speculation, ports, ORDERS)


def submit(request: str, prompt: list[int], params: SamplingParams, arrival: float = 0.0, **fields) -> Submit:
    outputs = fields.pop("outputs", {choice: [] for choice in range(params.n)})
    return Submit(request, prompt, params, outputs=outputs, arrival=arrival, **fields)


class Collected:
    """Events by request and choice, in the form that tests compare."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.finish: dict[tuple[str, int], str] = {}
        self.prompt_logprobs: dict[str, list[int]] = defaultdict(list)
        self.progress: dict[str, Progress] = {}
        self.withdrawn = 0
        self.vectors: dict[str, bytes] = {}

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                key = event.request, event.choice
                assert key not in self.finish, "a token came after the end"
                assert event.index == len(self.tokens[key]), "tokens come in order, each once"
                self.tokens[key].append(event.token)
                if event.finish:
                    self.finish[key] = event.finish
            elif isinstance(event, OutputWithdrawn):
                self.withdrawn += 1
                assert not any(request == event.request for request, _ in self.finish)
                for key in [key for key in self.tokens if key[0] == event.request]:
                    del self.tokens[key]
            elif isinstance(event, Pooled):
                assert event.request not in self.vectors
                self.vectors[event.request] = event.vector
            elif isinstance(event, Progress):
                self.progress[event.request] = event
            elif isinstance(event, Finished):
                self.finish[event.request, event.choice] = event.reason
            elif isinstance(event, PromptLogprobs):
                assert event.start == len(self.prompt_logprobs[event.request]) + 1
                self.prompt_logprobs[event.request] += [entry.token for entry in event.entries]


def finish(engine: Engine, collected: Collected, limit: int = 100_000) -> None:
    """Step until the engine has no work."""
    for _ in range(limit):
        if not engine.has_work:
            break
        collected.take(engine.step())
    assert_engine_empty(engine)


def assert_engine_empty(engine: Engine) -> None:
    """Assert that no sequence, block or sampling state is left in the engine."""
    pool = engine.scheduler.tables.pool
    assert not engine.has_work
    assert pool.free == pool.size
    assert engine.scheduler.swap.free == engine.scheduler.swap.size
    assert not engine.executor.states
    report = engine.report()
    assert (report.running, report.waiting, report.blocks_live) == (0, 0, 0)


def expected_outputs(
    prompt: list[int],
    params: SamplingParams,
    choice: int,
    count: int,
    vocab_size: int,
    adapter: str = "",
) -> list[int]:
    """Return the first `count` output tokens, which every schedule must produce. `adapter` is the LoRA
    adapter, or ""."""
    tokens = list(prompt)
    for _ in range(count):
        context = np.array(tokens, np.int64) + shift_of(adapter)
        tokens.append(next_token(context, params, choice, vocab_size))
    return tokens[len(prompt) :]


def expected(
    prompt: list[int], params: SamplingParams, choice: int, max_model_len: int, adapter: str = ""
) -> list[int]:
    count = min(params.max_tokens, max_model_len - len(prompt))
    return expected_outputs(prompt, params, choice, count, VOCAB, adapter)
