"""Quality of the packaged pair: held-out tasks by family, and acceptance of draft tokens by depth.

Acceptance is measured for coupled speculation: the draft samples with the target's noise. While its tokens
are accepted, the draft sees the target's text, so one pass over that text measures every depth: the draft
token at depth `d` is accepted when the draft is right at `d` consecutive positions.

    python -m benchmarks.packaged.embedded_quality --count 400
"""

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.options import parse, pick, results_folder
from benchmarks.report import PACKAGED_PAIR, table, write
from streamserve import LLM, SamplingParams, embedded
from streamserve.execution.compute.noise import gumbel
from streamserve.llm.llm import RequestOutput
from streamserve.protocol.grammar import Grammar

sys.path.insert(0, str(Path(__file__).parents[2] / "packaged_model"))
from embedded_data import FAMILIES
from embedded_data.checks import score
from embedded_data.records import schema_of

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MAX_TOKENS = 256
MAX_RECORD = 200
"""Maximum tokens of a record that a grammar constrains."""
DEPTHS = 8
EXITS = (2, 4)
"""Layers at which the target was also trained to predict tokens, for self-drafting."""

Matches = dict[str, list[NDArray[np.bool_]]]


def quality(llm: LLM, family: str, count: int, seed: int) -> tuple[dict[str, float], list[RequestOutput]]:
    """Return the mean score of `count` held-out replies by kind of check, and the outputs."""
    rng = random.Random(seed)
    turns: list[Any] = []
    while len(turns) < count:
        turns += FAMILIES[family](rng, "heldout").replies()
    turns = turns[:count]
    prompts = [llm.render(messages) for messages, _, _ in turns]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=pick(MAX_TOKENS, 4)))
    scores = defaultdict(list)
    for output, (_, _, check) in zip(outputs, turns, strict=True):
        scores[check.kind].append(score(check, output.outputs[0].text))
    everything = [value for values in scores.values() for value in values]
    figures = {"all": float(np.mean(everything)), "replies": float(len(everything))}
    return figures | {kind: float(np.mean(values)) for kind, values in scores.items()}, outputs


def under_grammar(llm: LLM, count: int, seed: int) -> dict[str, float]:
    """Return for `count` held-out records, each generated under the grammar of its schema: the share that is
    valid and complete, and the share of correct values among those that the text contains."""
    rng = random.Random(seed)
    turns: list[Any] = []
    while len(turns) < count:
        turns += FAMILIES["json"](rng, "heldout").replies()
    turns = turns[:count]
    params = []
    for _, reply, _ in turns:
        schema = schema_of(json.loads(reply)) | {"additionalProperties": False}
        grammar = Grammar(kind="json", text=json.dumps(schema))
        params.append(SamplingParams(temperature=0, max_tokens=pick(MAX_RECORD, 4), grammar=grammar))
    outputs = llm.generate([llm.render(messages) for messages, _, _ in turns], params)
    ended = [one.outputs[0].finish_reason == "stop" for one in outputs]
    # The grammar ends a record only when the object is complete, so it need not be validated again.
    right = [
        score(check, one.outputs[0].text)
        for one, (_, _, check) in zip(outputs, turns, strict=True)
        if check.kind == "json"
    ]
    return {
        "records": float(len(turns)),
        "ended by itself": float(np.mean(ended)),
        "right values": float(np.mean(right)),
    }


class Drafters:
    """The draft and the target's early layers, evaluated on texts of the target."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        def model(name: str) -> Any:
            return AutoModelForCausalLM.from_pretrained(embedded.path(name), dtype=torch.float32).eval()

        self.target, self.draft = model("embedded"), model("embedded-draft")

    @torch.no_grad()
    def matches(self, output: RequestOutput, seed: int | None) -> dict[str, NDArray[np.bool_]]:
        """Return for each drafter at which output positions its draft token is the target's token."""
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        ids, first = torch.tensor([prompt + tokens[:-1]]), len(prompt) - 1
        states = self.target(ids, output_hidden_states=True).hidden_states
        logits = {"draft": self.draft(ids).logits}
        for layers in EXITS:
            logits[f"self:{layers}"] = self.target.lm_head(self.target.model.norm(states[layers]))
        expected = np.array(tokens)
        return {name: _predict(rows[0, first:], seed) == expected for name, rows in logits.items()}


def _predict(logits: torch.Tensor, seed: int | None) -> NDArray[np.int64]:
    """Return the drafter's token in each row: the likeliest token, or the best under the request's noise."""
    scores = logits.double().numpy()
    if seed is not None:
        rows, vocab = scores.shape
        index = np.repeat(np.arange(rows), vocab)
        scores = scores + gumbel(seed, 0, index, np.tile(np.arange(vocab), rows)).reshape(rows, vocab)
    predicted: NDArray[np.int64] = scores.argmax(-1)
    return predicted


def by_depth(matches: Sequence[NDArray[np.bool_]]) -> list[float | None]:
    """Return the conditional acceptance at depth 1, 2, …: the accepted share of the draft tokens whose path
    so far was accepted."""
    reached, accepted = np.zeros(DEPTHS), np.zeros(DEPTHS)
    for match in matches:
        run = np.ones(len(match), bool)  # the path up to this depth, from each start
        for depth in range(min(DEPTHS, len(match))):
            run = run[: len(match) - depth]
            reached[depth] += run.sum()
            run = run & match[depth:]
            accepted[depth] += run.sum()
    return [float(a / r) if r else None for a, r in zip(accepted, reached, strict=True)]


def measure(count: int, acceptance_count: int, seed: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Return all results by family, and the results of records under a grammar."""
    figures: dict[str, Any] = {}
    drafters = Drafters()
    with LLM("embedded") as llm:
        constrained = under_grammar(llm, count, seed)
        for family in FAMILIES:
            scores, greedy = quality(llm, family, count, seed)
            chosen = greedy[:acceptance_count]
            prompts = [output.prompt_token_ids for output in chosen]
            params = [
                SamplingParams(seed=number, max_tokens=pick(MAX_TOKENS, 4)) for number in range(len(prompts))
            ]
            sampled = llm.generate(prompts, params)
            accepted: dict[str, Any] = {}
            for mode, outputs in (("greedy", chosen), ("T=1", sampled)):
                matches: Matches = defaultdict(list)
                for number, output in enumerate(outputs):
                    for name, match in drafters.matches(output, number if mode == "T=1" else None).items():
                        matches[name].append(match)
                accepted[mode] = {
                    name: {"mean": float(np.concatenate(measured).mean()), "by_depth": by_depth(measured)}
                    for name, measured in matches.items()
                }
            figures[family] = {"scores": scores, "acceptance": accepted}
    return figures, constrained


def show(figures: dict[str, Any]) -> None:
    """Print both tables."""
    rows = []
    for family, measured in figures.items():
        scores = dict(measured["scores"])
        replies, overall = scores.pop("replies"), scores.pop("all")
        kinds = ", ".join(f"{kind} {value:.0%}" for kind, value in sorted(scores.items()))
        rows.append([family, f"{replies:.0f}", f"{overall:.1%}", kinds])
    table("Held-out tasks", ["family", "replies", "right", "by kind of check"], rows)
    rows = [
        [
            family,
            mode,
            name,
            f"{one['mean']:.3f}",
            " ".join("-" if share is None else f"{share:.2f}" for share in one["by_depth"]),
        ]
        for family, measured in figures.items()
        for mode, names in measured["acceptance"].items()
        for name, one in names.items()
    ]
    table("Acceptance", ["family", "mode", "drafter", "mean", f"at depth 1 … {DEPTHS}"], rows)


def plot(figures: dict[str, Any], path: Path) -> None:
    """Plot acceptance of the draft by depth, a line a family, in panels for greedy and T=1."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for axis, mode in zip(axes, ("greedy", "T=1"), strict=True):
        for family, measured in figures.items():
            axis.plot(
                range(1, DEPTHS + 1), measured["acceptance"][mode]["draft"]["by_depth"], "o-", label=family
            )
        axis.set(title=mode, xlabel="depth", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accepted, given the path so far")
    axes[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=100, help="held-out replies in each family (default: %(default)s)"
    )
    parser.add_argument(
        "--acceptance", type=int, default=100, help="number of replies on which acceptance is measured"
    )
    parser.add_argument("--seed", type=int, default=3, help="seed of the held-out items")
    args = parse(parser, count=1, acceptance=1)
    figures, constrained = measure(args.count, args.acceptance, args.seed)
    show(figures)
    print(constrained)
    plot(figures, results_folder() / "embedded_quality.png")
    print(write("embedded_quality", vars(args), figures, PACKAGED_PAIR))
    print(write("embedded_json", vars(args), constrained, PACKAGED_PAIR))


if __name__ == "__main__":
    main()
