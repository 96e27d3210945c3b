"""Random combinations of everything: architectures, widths, KV, adapters, drafters, policies, orders,
eviction, prompt streams and complete prompts. Tokens, log-probabilities and finish reasons equal a plain
engine's."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamserve.baselines.orders import ORDERS
from streamserve.baselines.speculation import NAMES, parse_policy
from streamserve.engine.engine import Engine
from streamserve.engine.ports import EnginePorts
from streamserve.execution.loading.load import load
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.messages import Event, LoadAdapter, PromptLogprobs, Submit, Token
from streamserve.protocol.sampling import SamplingParams, Slo, SpeculationLimits
from streamserve.speculation.controller import Speculation
from streamserve.text.grammar import vocabulary
from streamserve.text.tokenizer import Tokenizer
from tests.adapters import opened, write_adapter
from tests.campaigns.settings.workload import GRAMMARS
from tests.conftest import Scale
from tests.engine.drive import Collected
from tests.engine.edits import StreamClient, run_scripts
from tests.exact.speculating import make_pair

LONGEST, CONTEXT = 110, 160
CLIENTS = 12
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "gemma2": {
        "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 24, "attn_logit_softcapping": 30.0,
        "final_logit_softcapping": 20.0,
    },
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32,
    },
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 24,
        "pad_token_id": None,
    },
}  # fmt: skip
WITH_EXPERTS = ("qwen3_moe", "gpt_oss")


@dataclass(frozen=True)
class Model:
    """A checkpoint, a draft model that often agrees with it, and adapters for it."""

    target: Path
    draft: Path
    adapters: tuple[LoadAdapter, ...]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def make(name: str) -> Model:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            target, draft = folder / "target", folder / "draft"
            target.mkdir()
            draft.mkdir()
            make_pair(target, draft, name, **ARCHITECTURES[name])
            folders = [] if name in WITH_EXPERTS else [folder / f"a{seed}" for seed in range(2)]
            for seed, path in enumerate(folders):
                write_adapter(path, target, rank=3 + seed, seed=seed, gain=0.3)
            adapters = [opened(path.name, path) for path in folders]
            loads = tuple(LoadAdapter(adapter.fingerprint, adapter.path) for adapter in adapters)
            made[name] = Model(target, draft, loads)
        return made[name]

    return make


class Client(StreamClient):
    """A client of a prompt stream, or of a complete prompt (`whole`), with any sampling parameters."""

    def __init__(self, rng: random.Random, number: int, adapters: list[str]) -> None:
        super().__init__(rng, number, LONGEST)
        self.adapter = rng.choice(["", *adapters])
        self.whole = rng.random() < 0.35
        if self.whole:
            self.edits, self.version, self.early = 0, 1, False
            self.prompt = ((self.prompt or [1]) * LONGEST)[: rng.randint(1, LONGEST)]
        grammar = rng.choice(GRAMMARS) if rng.random() < 0.15 else None
        self.params = SamplingParams(
            n=rng.choice((1, 1, 2, 3)),
            temperature=rng.choice((0.0, 0.0, 0.7, 1.0)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 0, 20)),
            min_p=rng.choice((0.0, 0.0, 0.02)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
            presence_penalty=rng.choice((0.0, 0.0, 0.4)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.15)),
            logit_bias=rng.choice(({}, {}, {7: 2.0})),
            seed=rng.getrandbits(40),
            max_tokens=rng.randint(1, 30),
            ignore_eos=grammar is None and rng.random() < 0.5,
            stop_token_ids=tuple(rng.sample(range(4, 300), 8)) if rng.random() < 0.15 else (),
            logprobs=rng.choice((None, 0, 2)),
            prompt_logprobs=rng.choice((None, 1)) if self.whole else None,
            grammar=grammar,
            slo=rng.choice((Slo(), Slo(tpot_ms=1.0), Slo(tpot_ms=5000.0, ttft_ms=10.0))),
            speculation=rng.choice((SpeculationLimits(), SpeculationLimits(max_depth=3, max_nodes=8))),
        )

    def start(self) -> Submit:
        started = self.submit() if self.whole else super().start()
        return replace(started, adapter=self.adapter, priority=self.rng.randint(-1, 1))

    def submit(self) -> Submit:
        """Return the message that submits the final prompt as a whole."""
        outputs: dict[int, list[int]] = {choice: [] for choice in range(self.params.n)}
        return Submit(
            self.name,
            list(self.prompt),
            self.params,
            outputs=outputs,
            arrival=0.0,
            adapter=self.adapter,
        )


class WithLogprobs(Collected):
    """Collects events with the log-probabilities of outputs and prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: dict[tuple[str, int], list[Any]] = defaultdict(list)
        self.prompts: dict[str, list[Any]] = defaultdict(list)

    def take(self, events: list[Event]) -> None:
        super().take(events)
        for event in events:
            if isinstance(event, Token):  # log-probabilities of a withdrawn answer are sent again
                known = self.logprobs[event.request, event.choice]
                del known[event.index :]
                known.append((event.token, event.logprob, event.top))
            elif isinstance(event, PromptLogprobs):
                self.prompts[event.request] += event.entries


def draw_widths(rng: random.Random) -> dict[str, Any]:
    return {
        "dtype": rng.choice(("bfloat16", "bfloat16", "float32")),
        "quantization": rng.choice(("none", "none", "int8", "w8a8", "int4", "int4:32")),
        "kv_cache_dtype": rng.choice(("auto", "int8")),
    }


def draw_settings(rng: random.Random, model: Model) -> tuple[dict[str, Any], str]:
    """Draw settings that must change no text, and a policy."""
    size, eviction = rng.choice((4, 5, 16)), rng.choice(("recompute", "swap", "cost"))
    draft = rng.choice(("none", "ngram", "self:1", str(model.draft), str(model.draft), str(model.target)))
    fixed = ("fixed:1", "fixed:4", "fixed:8", "fixed-tree:2x3", "fixed-tree:3x2")
    settings = {
        "draft": draft,
        "block_size": size,
        "num_blocks": rng.choice((-(-CONTEXT // size) + 2, -(-CONTEXT // size) + 10, 400)),
        "max_num_seqs": rng.choice((4, 8, 16)),
        "max_num_batched_tokens": rng.choice((16, 64, 256)),
        "max_chunk": rng.choice((3, 16, 200)),
        "eviction": eviction,
        "swap_space": 0.0 if eviction == "recompute" else rng.choice((0.0005, 0.01)),
        "preempt_every": rng.choice((0, 0, 3, 7)),
        "order": rng.choice(("slo", "arrival", "fcfs", "stta", "lcas", "mcps", "chunked", "prefill-first")),
        "enable_prefix_caching": rng.random() < 0.8,
        "threads": rng.choice((1, 2)),
    }
    return settings, "off" if draft == "none" else rng.choice((*fixed, *NAMES))


def make_engine(model: Model, adapters: tuple[LoadAdapter, ...], policy: str, **settings: Any) -> Engine:
    plain = {"threads": 1, "num_blocks": 400, "draft": "none"}
    config = ModelConfig(
        path=str(model.target), max_model_len=CONTEXT, max_loras=len(adapters), check=True,
        **(plain | settings),
    )  # fmt: skip
    tokenizer = Tokenizer.from_folder(model.target)
    loaded = load(config, lambda size, eos: vocabulary(tokenizer, size, eos))
    ticks = iter(range(10**9))
    engine = Engine(
        loaded.engine_config, loaded.model_info, loaded.executor, lambda: float(next(ticks)), loaded.drafter,
        Speculation(parse_policy(policy), lambda rows, kv_tokens: 1.0 + rows / 64),
        EnginePorts(adapters=loaded.adapters), ORDERS,
    )  # fmt: skip
    for adapter in adapters:
        assert engine.handle(adapter) == []
    if adapters:
        assert not any(answer.error for answer in engine.adapters.take_answers())
    return engine


def trial(
    rng: random.Random, models: Callable[[str], Model], adapted: bool, collect: pytest.MonkeyPatch
) -> Counter[str]:
    """Run clients on an engine with random settings, and with adapters if `adapted`. Raises AssertionError if
    a result differs."""
    name = rng.choice([name for name in ARCHITECTURES if not (adapted and name in WITH_EXPERTS)])
    model = models(name)
    adapters = model.adapters if adapted else ()
    widths = draw_widths(rng)
    settings, policy = draw_settings(rng, model)
    described = name, bool(adapters), widths, settings, policy
    engine = make_engine(model, adapters, policy, **widths, **settings)
    clients = [Client(rng, number, [a.fingerprint for a in adapters]) for number in range(CLIENTS)]
    collect.setattr("tests.engine.edits.Collected", WithLogprobs)
    counts, found = run_scripts(rng, engine, clients)
    assert isinstance(found, WithLogprobs)
    plain, expected = make_engine(model, adapters, "off", **widths), WithLogprobs()
    for client in clients:
        plain.handle(client.submit())
        while plain.has_work:
            expected.take(plain.step())
    assert found.tokens == expected.tokens, described
    assert found.finish == expected.finish, described
    assert found.logprobs == expected.logprobs, described
    assert found.prompts == expected.prompts, described
    counters, report = engine.speculation.counters, engine.report()
    assert sum(counters.trees_by_nodes) <= counters.drafts
    assert counters.accepted <= counters.verified <= counters.drafted
    assert report.evictions.blocks_back <= report.evictions.blocks_out
    for each in (engine, plain):
        each.executor.close()
    return counts + Counter(
        accepted=counters.accepted, preempted=report.preemptions,
        adapted=sum(bool(client.adapter) for client in clients),
        logprobs=sum(map(len, expected.logprobs.values())), prompt_logprobs=len(expected.prompts),
    )  # fmt: skip


def test_all_results_are_those_of_a_plain_engine(
    models: Callable[[str], Model],
    monkeypatch: pytest.MonkeyPatch,
    scale: Scale,
    record: Callable[..., None],
) -> None:
    rng, total = random.Random(scale.seed), Counter[str]()
    trials = scale.pick(5, 150)
    for number in range(trials):
        total += trial(rng, models, number % 2 == 0, monkeypatch)
    record(trials=trials, **total)
    for what in (
        "mid_step", "invalidated", "withdrawn", "swaps", "swapped_back", "recomputes", "copies", "accepted",
        "preempted", "adapted", "logprobs", "prompt_logprobs",
    ):  # fmt: skip
        assert total[what] > 0, what
