"""Engines with speculation for tests: a target and a draft model that agree often, requests that use every
sampling parameter that depends on the path, and counts of events."""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.tree import TokenTree
from streamserve.engine.engine import Engine
from streamserve.execution.loading.load import load
from streamserve.protocol.config import Backend, KVCacheDType, ModelConfig, SpeculationMode
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.messages import Cancel, DraftVerified, Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.controller import MeasuredStep, Round, Speculation, SpeculationBatch
from streamserve.text.grammar import vocabulary
from streamserve.text.output import ChoiceText
from streamserve.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint

MAX_OUTPUT = 64
MAX_PROMPT = 200
WORDS = Grammar(kind="regex", text="[a-z]{1,9}( [a-z]{1,9}){4,30}")


@dataclass(frozen=True)
class Case:
    """The settings of an engine with speculation."""

    draft: str = "model"
    policy: str = "fixed:4"
    chunk: int = 512
    blocks: int = 1024
    preempt_every: int = 0
    backend: Backend = "auto"
    dtype: str = "float32"
    quantization: str = "none"
    kv_cache_dtype: KVCacheDType = "auto"


def make_pair(target: Path, draft: Path, architecture: str = "llama", **overrides: Any) -> tuple[Path, Path]:
    """Make a target that sometimes repeats itself and whose second layer changes little, so that the first
    layer alone drafts well, and a draft model: the target with noise added to its weights."""
    for folder in (target, draft):
        make_checkpoint(folder, architecture, max_position_embeddings=1024, **overrides)
        edit(folder, lambda name, tensor: 0.05 * tensor if _late(name) else tensor)
    disturb(draft, 0.03)
    return target, draft


def _late(name: str) -> bool:
    """Return whether a tensor is a matrix of the second layer that ends attention or the MLP, or an
    expert."""
    out = ("o_proj.weight", "down_proj.weight", "down_proj", "w2.weight")
    return name.startswith("model.layers.1.") and name.endswith(out)


def disturb(folder: Path, share: float) -> None:
    """Add noise to a checkpoint's matrices. Its standard deviation is `share` of the matrix's."""
    generator = torch.Generator().manual_seed(5)
    edit(
        folder,
        lambda _, tensor: (
            tensor + share * tensor.std() * torch.randn(tensor.shape, generator=generator)
            if tensor.ndim >= 2
            else tensor
        ),
    )


def with_padding(folder: Path, rows: int) -> Path:
    """Enlarge a checkpoint's embedding and head to this number of rows. The new rows repeat the first ones,
    so they are as likely as tokens with a text."""
    edit(
        folder,
        lambda name, tensor: (
            tensor.repeat(2, 1)[:rows].contiguous()
            if name in ("model.embed_tokens.weight", "lm_head.weight")
            else tensor
        ),
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    return folder


def edit(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace a checkpoint's tensors by the result of `change`."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {name: change(name, tensor) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


class Watched(Speculation):
    """A policy that counts the outcomes of tree verification by kind."""

    def __init__(self, policy: str) -> None:
        super().__init__(parse_policy(policy), lambda rows, kv_tokens: 1.0 + rows / 64)
        self.events: Counter[str] = Counter()

    def begin(self, batch: SpeculationBatch) -> Round:
        return WatchedRound(self, batch)

    def watch(self, tree: TokenTree, tokens: Sequence[int], sampled: bool) -> None:
        path, parents = tree.follow(tokens), tree.parents
        self.events["all draft tokens rejected"] += len(path) == 1 < len(tree)
        self.events["all draft tokens accepted"] += len(path) == 1 + max(tree.depths()) > 1
        self.events["accepted by a sampled request"] += sampled and len(path) > 1
        self.events["a sibling accepted"] += any(parents[node] in parents[:node] for node in path[1:])
        self.events["KV moved"] += path != list(range(len(path)))


class WatchedRound(Round):
    """A step's round that counts the outcomes of its trees."""

    def __init__(self, watched: Watched, batch: SpeculationBatch) -> None:
        super().__init__(watched, batch)
        self._watched = watched

    def learn(self, step: MeasuredStep) -> None:
        super().learn(step)
        for id, tree, tokens in step.verified:
            self._watched.watch(tree, tokens, self.drafted[id].sampled)


def make_engine(pair: tuple[Path, Path], case: Case, mode: SpeculationMode = "coupled") -> Engine:
    target, draft = pair
    config = ModelConfig(
        path=str(target), dtype=case.dtype, backend=case.backend, threads=1, num_blocks=case.blocks,
        max_model_len=MAX_PROMPT + MAX_OUTPUT, max_num_seqs=32, max_chunk=case.chunk,
        preempt_every=case.preempt_every, speculation_mode=mode, quantization=case.quantization,
        kv_cache_dtype=case.kv_cache_dtype,
        draft=str(draft) if case.draft == "model" else case.draft,
    )  # fmt: skip
    loaded = load(config, lambda size, eos: vocabulary(Tokenizer.from_folder(target), size, eos))
    ticks = iter(range(10**9))
    return Engine(
        loaded.engine_config, loaded.model_info, loaded.executor, lambda: float(next(ticks)),
        loaded.drafter, Watched(case.policy),
    )  # fmt: skip


def make_requests(rng: random.Random, count: int, vocabulary: int) -> list[Submit]:
    """Make greedy and seeded requests with penalties, biases and minimum lengths. Of every eight, one has a
    grammar, one stop strings, one stop tokens, one two choices, and two share a prefix."""
    shared = [rng.randrange(4, vocabulary) for _ in range(40)]
    requests = []
    for number in range(count):
        phrase = [rng.randrange(4, vocabulary) for _ in range(rng.randint(1, 12))]
        prompt = (phrase * MAX_PROMPT)[: rng.randint(1, MAX_PROMPT)]
        prompt += [rng.randrange(4, vocabulary) for _ in range(max(0, min(4, MAX_PROMPT - len(prompt))))]
        if number % 8 in (4, 5):
            prompt = (shared + prompt)[:MAX_PROMPT]
        greedy = number // 2 % 2 == 0
        choices = 2 if number % 8 == 3 else 1
        params = SamplingParams(
            n=choices,
            temperature=0.0 if greedy else rng.choice((0.5, 0.8, 0.9, 1.0, 1.3)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 20)),
            min_p=rng.choice((0.0, 0.05)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.4)),
            presence_penalty=rng.choice((0.0, 0.0, 0.3)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.1)),
            logit_bias={rng.randrange(vocabulary): 2.0} if rng.random() < 0.2 else {},
            seed=rng.getrandbits(63),
            max_tokens=MAX_OUTPUT,
            min_tokens=rng.choice((0, 20)),
            stop=("e", "q") if number % 8 == 2 else (),
            stop_token_ids=tuple(rng.sample(range(vocabulary), 40)) if number % 8 == 6 else (),
            ignore_eos=rng.random() < 0.8,
            logprobs=2 if rng.random() < 0.2 else None,
            grammar=WORDS if number % 8 == 1 else None,
        )
        outputs: dict[int, list[int]] = {choice: [] for choice in range(choices)}
        requests.append(Submit(str(number), prompt, params, outputs=outputs, arrival=float(number)))
    return requests


Texts = dict[tuple[str, int], list[Token]]


@dataclass
class Served:
    """The tokens of all choices until their readers stopped, and counts of events."""

    texts: Texts = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)


def serve(engine: Engine, requests: Sequence[Submit], concurrency: int, tokenizer: Tokenizer) -> Served:
    """Run all requests, `concurrency` at a time, and detect their stop strings as a server does."""
    served, waiting = Served(), list(requests)
    readers: dict[tuple[str, int], ChoiceText] = {}
    active: set[tuple[str, int]] = set()
    while waiting or engine.has_work:
        while waiting and len(active) < concurrency:
            request = waiting.pop(0)
            for choice in request.outputs:
                readers[request.request, choice] = ChoiceText(tokenizer, request.params, choice)
                active.add((request.request, choice))
            engine.handle(request)
        verified: dict[tuple[str, int], DraftVerified] = {}
        counts: Counter[tuple[str, int]] = Counter()
        for event in engine.step():
            if isinstance(event, DraftVerified):
                verified[event.request, event.choice] = event
            if isinstance(event, Token):
                key = event.request, event.choice
                counts[key] += 1
                _take(served, readers[key], event, key in verified, engine)
                if readers[key].finished:
                    active.discard(key)
        served.events["cut by what ends a text"] += sum(
            counts[key] <= verification.accepted and readers[key].finished
            for key, verification in verified.items()
        )
    assert engine.report().blocks_live == 0
    return served


def _take(served: Served, reader: ChoiceText, event: Token, verified: bool, engine: Engine) -> None:
    """Give a token to its reader, unless the reader has stopped."""
    if reader.finished:
        served.events["behind a stop string"] += 1
        return
    delta = reader.feed(event)
    served.texts.setdefault((event.request, event.choice), []).append(event)
    served.events["drafted after a prompt"] += verified and event.index == 0
    if delta is not None and isinstance(delta.stop, str):
        served.events["stop string"] += 1
        engine.handle(Cancel(event.request, event.choice))
    elif delta is not None and delta.finish == "stop":
        served.events["ended by a token or a grammar"] += 1


def run(engine: Engine, requests: Sequence[Submit], concurrency: int) -> dict[str, list[Token]]:
    """Return the tokens of requests of one choice, without detecting stop strings."""
    texts: dict[str, list[Token]] = {request.request: [] for request in requests}
    waiting, active = list(requests), set[str]()
    while waiting or engine.has_work:
        while waiting and len(active) < concurrency:
            request = waiting.pop(0)
            engine.handle(request)
            active.add(request.request)
        for event in engine.step():
            if isinstance(event, Token):
                texts[event.request].append(event)
                if event.finish:
                    active.discard(event.request)
    assert engine.report().blocks_live == 0
    return texts
