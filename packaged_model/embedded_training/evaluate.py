"""Scores of the target and the draft's agreement with it: held-out chats and new chats of familiar kinds."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path

import torch
from embedded_data import FAMILIES, Check, Message, Split
from embedded_data.checks import score
from tokenizers import Tokenizer

from .generate import greedy
from .losses import EXITS
from .model import Llama
from .tokenizer import IM_END, render

LIMIT = 220
BATCH = 24
# New draws from the training templates and words come first, then the ones no training chat ever used.
KINDS: list[tuple[str, str, Split]] = [(family, family, "train") for family in FAMILIES] + [
    (f"{family}, held out", family, "heldout") for family in FAMILIES
]
Report = dict[str, dict[str, float]]
Item = tuple[list[Message], str, Check]


def _rounded(model: Llama) -> Llama:
    """The model with the bfloat16 weights that are shipped."""
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model.eval()


def items(family: str, split: Split, count: int, seed: int) -> list[Item]:
    """Every reply of ``count`` chats, with the messages before it; no corpus is drawn with this seed."""
    rng = random.Random(f"evaluate {seed}")
    return [turn for _ in range(count) for turn in FAMILIES[family](rng, split).replies()]


@torch.inference_mode()
def agreement(target: Llama, draft: Llama, prompt: list[int], reply: list[int]) -> dict[str, list[bool]]:
    """At each token of a reply: is the drafter's greedy token the target's?"""
    ids, first = torch.tensor([prompt + reply]), len(prompt) - 1
    *inner, last = target(ids, EXITS)
    expected = target.head(last)[0, first:].argmax(-1)
    logits_by_drafter = {"draft": draft.head(draft(ids)[-1])}
    logits_by_drafter |= {
        f"self:{layers}": target.head(stream) for layers, stream in zip(EXITS, inner, strict=True)
    }
    return {
        name: (logits[0, first:].argmax(-1) == expected).tolist()
        for name, logits in logits_by_drafter.items()
    }


def _family(
    target: Llama, draft: Llama, tokenizer: Tokenizer, turns: list[Item]
) -> tuple[dict[str, float], dict[str, list[float]]]:
    scores: dict[str, list[float]] = defaultdict(list)
    agreed: dict[str, list[bool]] = defaultdict(list)
    turns = sorted(turns, key=lambda turn: len(render(turn[0])))
    for at in range(0, len(turns), BATCH):
        some = turns[at : at + BATCH]
        prompts = [tokenizer.encode(render(messages, prompt=True)).ids for messages, _, _ in some]
        for prompt, reply, (_, _, check) in zip(prompts, greedy(target, prompts, LIMIT), some, strict=True):
            scores[check.kind].append(score(check, tokenizer.decode(reply)))
            for name, same in agreement(target, draft, prompt, [*reply, IM_END]).items():
                agreed[name] += same
    every = [value for values in scores.values() for value in values]
    figures = {"score": sum(every) / len(every), "replies": float(len(every))}
    return figures | {name: sum(same) / len(same) for name, same in agreed.items()}, scores


def evaluate(target: Llama, draft: Llama, work: Path, count: int, seed: int = 3) -> Report:
    """Scores and agreement of every family, both ways; also written to ``evaluation.json``."""
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    target, draft, report = _rounded(target), _rounded(draft), {}
    for name, family, split in KINDS:
        figures, scores = _family(target, draft, tokenizer, items(family, split, count, seed))
        report[name] = figures | {f"check {kind}": sum(v) / len(v) for kind, v in scores.items()}
    (work / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def show(report: Report) -> None:
    """Print the report."""
    for family, figures in report.items():
        print(
            f"{family:>23}  "
            + "  ".join(
                f"{name} {value:.0f}" if name == "replies" else f"{name} {value:.1%}"
                for name, value in figures.items()
            ),
            flush=True,
        )
