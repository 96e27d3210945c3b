"""Record the draft trees that the packaged draft proposes along texts of the packaged target, and which nodes
match.

Greedy texts of every family of tasks are used. At every position of each text, trees of all recorded shapes
are drafted. `streamserve.simulate` replays the file in virtual time.

python -m benchmarks.speculation.record_acceptance
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.options import cache, parse, pick
from benchmarks.recorded import Node, Recording, pack
from benchmarks.speculation.speculation import FAMILIES, TASKS
from streamserve import embedded
from streamserve.baselines.fixed import SPECINFER
from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.plan import DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.engine.engine import Engine
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.messages import Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.controller import Speculation, default_cost
from streamserve.speculation.shapes import TreeShape

PATH = Path(__file__).parents[1] / "data" / "acceptance.npz"
SHAPES = {
    "1": TreeShape(16, 1),
    "2": TreeShape(10, 2),
    "3": TreeShape(8, 3),
    "4": TreeShape(8, 4),
    "specinfer": SPECINFER,
}
SHORTEST, LONGEST = 16, 64
TEXTS, SEED, SPLIT = 24, 1, "heldout"
GREEDY = SamplingParams(temperature=0.0, max_tokens=LONGEST)


def prompts(family: str, count: int, seed: int, split: Any) -> list[list[int]]:
    """Return the token ids of the first question of `count` chats."""
    tokenizer = Tokenizer.from_file(str(embedded.path("embedded") / "tokenizer.json"))
    rng, measured = random.Random(seed), []
    while len(measured) < count:
        messages, _, _ = FAMILIES[family](rng, split).replies()[0]
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        measured.append(tokenizer.encode(text + "<|im_start|>assistant\n").ids)
    return measured


def questions(loaded: Loaded, recording: Recording) -> tuple[list[list[int]], list[int]]:
    """Return the prompts of the recorded texts, and the texts' lengths. The texts are generated again with a
    model that computes the packaged model's function. Raises ValueError if they differ from the recording."""
    measured, lengths = [], []
    for family in TASKS:
        requests = prompts(family, TEXTS, SEED, SPLIT)
        pairs = zip(requests, texts(loaded, requests), strict=True)
        cached = [(prompt, len(answer)) for prompt, answer in pairs if len(answer) >= SHORTEST]
        measured += [prompt for prompt, _ in cached]
        lengths += [length for _, length in cached]
    starts = np.diff(recording.starts).tolist()
    if len(starts) != len(lengths):
        raise ValueError(f"{len(starts)} texts were recorded, and there are {len(lengths)} now")
    return measured, [min(length, recorded) for length, recorded in zip(lengths, starts, strict=True)]


def texts(loaded: Loaded, requests: Sequence[list[int]]) -> list[list[int]]:
    """Return the target's greedy answers."""
    engine = Engine(
        loaded.engine_config, loaded.model_info, loaded.executor, lambda: 0.0, None,
        Speculation(parse_policy("off"), default_cost),
    )  # fmt: skip
    measured: list[list[int]] = [[] for _ in requests]
    for number, prompt in enumerate(requests):
        engine.handle(Submit(str(number), prompt, GREEDY, outputs={0: []}, arrival=float(number)))
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Token):
                measured[int(event.request)].append(event.token)
    return measured


def drafted(
    loaded: Loaded, requests: Sequence[list[int]], answers: Sequence[list[int]], shape: TreeShape
) -> list[list[TokenTree]]:
    """Return for each text the trees drafted after its prompt and after each of its tokens but the last."""
    drafter, size = loaded.drafter, loaded.engine_config.block_size
    assert drafter is not None
    pages = -(-max(len(p) + len(a) + shape.nodes for p, a in zip(requests, answers, strict=True)) // size)
    measured: list[list[TokenTree]] = [[] for _ in requests]
    for position in range(max(map(len, answers))):
        draft_requests = []
        for number, (prompt, answer) in enumerate(zip(requests, answers, strict=True)):
            if position >= len(answer):
                continue
            tokens = prompt + answer[:position]
            draft_requests.append(
                DraftRequest(
                    id=number, epoch=0, tokens=tokens, length=len(tokens),
                    choice=0, output=position, params=GREEDY, depth=shape.depth, width=shape.width,
                    nodes=shape.nodes, computed=len(tokens) - 1 if position else 0,
                    blocks=list(range(number * pages, (number + 1) * pages)), expansion=shape.expansion,
                )
            )  # fmt: skip
        drafter.begin(draft_requests)
        for number, tree in drafter.collect(0.0).items():
            measured[number].append(tree)
    drafter.release(list(range(len(requests))))
    return measured


def outcome(tree: TokenTree, following: Sequence[int]) -> tuple[Node, ...]:
    """Return the tree's nodes, and which of them match the text's next tokens."""
    right = set(tree.follow(following))
    return tuple((tree.parents[node], tree.scores[node], node in right) for node in range(1, len(tree)))


def main() -> None:
    """Record, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=TEXTS, help="prompts in each family")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--split", choices=("train", "heldout"), default=SPLIT, help="which wordings of the tasks"
    )
    args = parse(parser, texts=1)
    target, draft = embedded.path("embedded"), embedded.path("embedded").parent / "draft"
    loaded = load(ModelConfig(path=str(target), draft=str(draft), num_blocks=2048, max_model_len=1024))
    shapes = pick(SHAPES, {"1": SHAPES["1"]})
    trees: dict[str, list[tuple[Node, ...]]] = {kind: [] for kind in shapes}
    starts, families = [0], []
    for family in pick(TASKS, TASKS[:1]):
        requests = prompts(family, args.texts, args.seed, args.split)
        pairs = [
            pair for pair in zip(requests, texts(loaded, requests), strict=True) if len(pair[1]) >= SHORTEST
        ]
        if not pairs:
            continue
        requests, answers = [list(column) for column in zip(*pairs, strict=True)]
        for kind, shape in shapes.items():
            for answer, grown in zip(answers, drafted(loaded, requests, answers, shape), strict=True):
                trees[kind] += [outcome(tree, answer[position:]) for position, tree in enumerate(grown)]
        before = starts[-1]
        starts += (before + np.cumsum([len(answer) for answer in answers])).tolist()
        families += [family] * len(answers)
        first = [tree[0][2] for tree in trees["1"][before:] if tree]
        print(f"{family}: {len(answers)} texts, first draft token accepted {np.mean(first):.2f}")
    path = cache(PATH)
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, **pack(Recording(trees, tuple(starts), tuple(families))))
    print(f"{starts[-1]} positions in {path}, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
