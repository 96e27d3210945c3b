"""Every output is valid by its schema, and the same whatever other requests the engine runs."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import torch

from streamserve.baselines.speculation import parse_policy
from streamserve.engine.engine import Engine
from streamserve.execution.loading.load import load
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.messages import Finished, Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.controller import Speculation
from streamserve.text.grammar import vocabulary
from streamserve.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.schemas import random_schema

EMBEDDED = Path(__file__).parents[2] / "src" / "streamserve" / "embedded" / "target"
MAX_OUTPUT = 700
PROMPT = "the quick brown fox"

Texts = dict[str, list[int]]


@pytest.fixture(scope="module", params=["random", "embedded"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    if request.param == "embedded":
        return EMBEDDED
    return make_checkpoint(tmp_path_factory.mktemp("random"), max_position_embeddings=1024)


def make_engine(folder: Path, policy: str = "off", **settings: Any) -> Engine:
    sizes = {"num_blocks": 1024, "max_model_len": MAX_OUTPUT + 32, "max_num_seqs": 16}
    config = ModelConfig(path=str(folder), threads=1, **{**sizes, **settings})
    loaded = load(config, lambda size, eos: vocabulary(Tokenizer.from_folder(folder), size, eos))
    speculation = Speculation(parse_policy(policy), lambda rows, kv_tokens: 1.0 + rows / 64)
    ticks = iter(range(10**9))
    return Engine(
        loaded.engine_config, loaded.model_info, loaded.executor, lambda: float(next(ticks)),
        loaded.drafter, speculation,
    )  # fmt: skip


def make_requests(folder: Path, seed: int, count: int) -> tuple[list[Submit], list[dict[str, Any]]]:
    """Make seeded requests with random schemas, some greedy; every third has further sampling parameters."""
    rng, tokenizer = random.Random(seed), Tokenizer.from_folder(folder)
    schemas = [random_schema(rng) for _ in range(count)]
    requests = []
    for number, schema in enumerate(schemas):
        params = SamplingParams(
            temperature=0.0 if number % 4 == 0 else 1.0,
            seed=number,
            max_tokens=MAX_OUTPUT,
            grammar=Grammar(kind="json", text=json.dumps(schema)),
        )
        if number % 3 == 0:
            changes = rng.choice(
                [{"ignore_eos": True}, {"min_tokens": 30}, {"top_p": 0.9}, {"frequency_penalty": 0.5}]
            )
            params = msgspec.structs.replace(params, **changes)
        prompt = tokenizer.encode(PROMPT[: rng.randint(1, len(PROMPT))])
        requests.append(Submit(f"s{number}", prompt, params, outputs={0: []}, arrival=float(number)))
    return requests, schemas


def plain_requests(count: int, vocabulary: int) -> list[Submit]:
    """Make requests without a grammar."""
    rng = random.Random(count)
    prompts = [[rng.randrange(4, vocabulary) for _ in range(rng.randint(1, 40))] for _ in range(count)]
    params = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)
    return [
        Submit(f"p{n}", prompt, params, outputs={0: []}, arrival=n / 2) for n, prompt in enumerate(prompts)
    ]


def run(engine: Engine, requests: list[Submit]) -> tuple[Texts, dict[str, str | None]]:
    """Return each choice's tokens and finish reason."""
    texts: Texts = {}
    finish_reasons: dict[str, str | None] = {}
    for request in requests:
        engine.handle(request)
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, Finished), event
            if isinstance(event, Token):
                texts.setdefault(event.request, []).append(event.token)
                finish_reasons[event.request] = event.finish
    assert engine.report().blocks_live == 0
    return texts, finish_reasons


def test_every_output_is_valid_and_the_same_alone_and_co_batched(
    folder: Path, scale: Scale, record: Callable[..., None]
) -> None:
    count = scale.pick(10, 120)
    requests, schemas = make_requests(folder, scale.seed, count)
    tokenizer = Tokenizer.from_folder(folder)
    together = make_engine(folder, max_chunk=7)
    plain = plain_requests(count, 320)
    texts, finish_reasons = run(together, sorted([*requests, *plain], key=lambda request: request.arrival))
    for request, schema in zip(requests, schemas, strict=True):
        assert finish_reasons[request.request] == "stop"
        answer = tokenizer.decode(texts[request.request])
        jsonschema.validate(json.loads(answer), schema)
    alone = make_engine(folder)
    for request in (*requests[: count // 2], *plain[: count // 2]):
        assert run(alone, [request])[0][request.request] == texts[request.request]
    record(answers=count, tokens=sum(map(len, texts.values())), seed=scale.seed)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("preempted", {"preempt_every": 3}),
        ("chain", {"draft": "ngram", "policy": "fixed:4"}),
        ("tree", {"draft": "self:1", "policy": "fixed-tree:2x3"}),
        ("preempted-tree", {"draft": "self:1", "policy": "fixed-tree:2x3", "preempt_every": 4}),
    ],
)
def test_preemption_and_speculation_change_no_output(
    folder: Path, name: str, settings: dict[str, Any], scale: Scale, record: Callable[..., None]
) -> None:
    requests, _ = make_requests(folder, scale.seed + 1, scale.pick(6, 40))
    expected, _ = run(make_engine(folder), requests)
    engine = make_engine(folder, **settings)
    texts, _ = run(engine, requests)
    assert texts == expected
    report, accepted = engine.report(), engine.speculation.counters.accepted
    if "preempt_every" in settings:
        assert report.preemptions > 0
    if "draft" in settings:
        assert accepted > 0
    record(answers=len(texts), preemptions=report.preemptions, accepted=accepted)


def test_a_draft_model_follows_the_grammar(folder: Path, scale: Scale, record: Callable[..., None]) -> None:
    """A draft model follows the grammar: with the target as its own draft model, all draft tokens are
    accepted."""
    requests, _ = make_requests(folder, scale.seed + 3, scale.pick(6, 40))
    greedy = [
        msgspec.structs.replace(one, params=msgspec.structs.replace(one.params, temperature=0.0))
        for one in requests
    ]
    expected, _ = run(make_engine(folder), greedy)
    engine = make_engine(folder, draft=str(folder), policy="fixed:4", preempt_every=9)
    assert run(engine, greedy)[0] == expected
    counters = engine.speculation.counters
    assert counters.accepted > 100
    assert counters.accepted >= 0.97 * counters.verified, (
        "all draft tokens but those after the end of an output"
    )
    assert engine.report().preemptions > 0
    record(answers=len(greedy), verified=counters.verified, accepted=counters.accepted)


def test_a_resumed_output_continues_where_it_was(folder: Path, scale: Scale) -> None:
    """A resumed output continues where it ended, as after the loss of a worker: the grammar state is rebuilt
    from the outputs."""
    requests, _ = make_requests(folder, scale.seed + 2, scale.pick(5, 40))
    expected, _ = run(make_engine(folder), requests)
    rng = random.Random(scale.seed)
    resumed = make_engine(folder)
    for request in requests:
        full_output = expected[request.request]
        emitted = full_output[: rng.randint(1, len(full_output) - 1)]
        resubmitted = msgspec.structs.replace(request, outputs={0: emitted}, attempt=1)
        assert emitted + run(resumed, [resubmitted])[0][request.request] == full_output


def test_each_choice_follows_the_grammar(folder: Path) -> None:
    engine, tokenizer = make_engine(folder), Tokenizer.from_folder(folder)
    grammar = Grammar(kind="regex", text="[a-z]{3}-[0-9]{4}")
    params = SamplingParams(n=4, seed=5, max_tokens=40, grammar=grammar, temperature=1.5)
    request = Submit("n", [5, 6, 7], params, outputs={choice: [] for choice in range(4)}, arrival=0.0)
    engine.handle(request)
    texts: dict[int, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Token) and event.finish is None:
                texts.setdefault(event.choice, []).append(event.token)
    answers = [tokenizer.decode(tokens) for tokens in texts.values()]
    assert len(set(answers)) > 1
    for answer in answers:
        assert len(answer) == 8
        assert answer[3] == "-"


@pytest.mark.parametrize(
    "broken", [Grammar(kind="regex", text="(("), Grammar(kind="lark", text="start: nowhere")]
)
def test_a_grammar_that_cannot_be_compiled_ends_only_its_request(folder: Path, broken: Grammar) -> None:
    engine = make_engine(folder)
    plain = plain_requests(2, 320)
    bad = Submit("bad", [5], SamplingParams(n=2, seed=1, grammar=broken), outputs={0: [], 1: []})
    for request in (bad, *plain):
        engine.handle(request)
    errors, tokens = [], 0
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Finished):
                assert event.request == "bad"
                errors.append(event.error)
            tokens += isinstance(event, Token)
    assert len(errors) == 2
    assert all("cannot be compiled" in error for error in errors)
    assert tokens == 120
    assert engine.report().blocks_live == 0
