"""Quality of the packaged model at each width: its distributions compared with 16 bits, and its tasks.

Distributions are compared at every token of held-out replies, teacher-forced. Acceptance is
measured with the packaged draft (in 16 bits), while a target of that width serves the same requests.

    python -m benchmarks.packaged.width_quality --count 100
"""

import argparse
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.options import parse
from benchmarks.packaged.embedded_quality import FAMILIES, quality
from benchmarks.report import PACKAGED_PAIR, table, write
from streamserve import LLM, embedded
from streamserve.contracts.plan import Span
from streamserve.contracts.tree import root
from streamserve.execution.compute.passes import ModelPasses
from streamserve.execution.loading.load import load, make_attention
from streamserve.execution.model.layout import lay_out
from streamserve.protocol.config import ModelConfig

PLAIN = "16 bits"
WIDTHS: dict[str, dict[str, str]] = {
    PLAIN: {},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "int8, int8 KV": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "w8a8": {"quantization": "w8a8"},
    "int4:32": {"quantization": "int4:32"},
    "int4": {"quantization": "int4"},
    "int4:128": {"quantization": "int4:128"},
    "int4, int8 KV": {"quantization": "int4", "kv_cache_dtype": "int8"},
}
"""Settings by the name of the weights' width."""
BLOCK = 16
MAX_TEXT = 1024


@dataclass(frozen=True)
class Text:
    """A prompt with a held-out reply, as token ids; the reply begins at index `first`."""

    tokens: list[int]
    first: int


def draw_texts(llm: LLM, family: str, count: int, seed: int) -> list[Text]:
    """Return `count` held-out replies of a family, with the data's correct answers."""
    rng = random.Random(seed)
    texts: list[Text] = []
    while len(texts) < count:
        for messages, reply, _ in FAMILIES[family](rng, "heldout").replies():
            prompt = llm.render(messages)
            tokens = [*prompt, *llm.tokenizer.encode(reply)]
            if len(tokens) < MAX_TEXT:
                texts.append(Text(tokens, len(prompt)))
    return texts[:count]


@dataclass(frozen=True)
class Reader:
    """A model that reads texts in blocks of BLOCK tokens, one of `passes` after another."""

    passes: ModelPasses

    @torch.inference_mode()
    def log_probabilities(self, text: Text) -> Tensor:
        """Return the log-probabilities [reply tokens, vocabulary] that predict each reply token."""
        tokens = text.tokens[:-1]
        blocks = list(range(-(-len(tokens) // BLOCK)))
        span = Span(0, 0, tokens, blocks, root(tokens[-1]), (0,), prompt_logprobs=True)
        logits = self.passes.logits(self.passes.forward(lay_out([span], BLOCK)))
        return torch.log_softmax(logits[text.first - 1 :].double(), -1)


def packaged(settings: Mapping[str, str]) -> Reader:
    """Return the packaged model with the settings of one width."""
    plain = ModelConfig(
        path=str(embedded.path("embedded")), draft="none", num_blocks=MAX_TEXT // BLOCK,
        block_size=BLOCK, max_model_len=MAX_TEXT,
    )  # fmt: skip
    loaded = load(msgspec.structs.replace(plain, **settings))
    return Reader(ModelPasses(loaded.model, make_attention(loaded.cache, loaded.model.spec, loaded.pool)))


def distributions(readers: dict[str, Reader], texts: Sequence[Text]) -> dict[str, dict[str, float]]:
    """Return by width the perplexity of the replies and, against 16 bits, the mean divergence (KL, in nats)
    and the share of tokens with the same most probable one."""
    sums = {width: {"perplexity": 0.0, "divergence": 0.0, "same greedy token": 0.0} for width in readers}
    tokens = 0
    for text in texts:
        replied = torch.tensor(text.tokens[text.first :])
        tokens += len(replied)
        exact = readers[PLAIN].log_probabilities(text)
        for width, reader in readers.items():
            rounded = exact if width == PLAIN else reader.log_probabilities(text)
            own = rounded.gather(1, replied[:, None])
            sums[width]["perplexity"] -= float(own.sum())
            sums[width]["divergence"] += float((exact.exp() * (exact - rounded)).sum())
            sums[width]["same greedy token"] += float((exact.argmax(-1) == rounded.argmax(-1)).sum())
    means = {width: {name: value / tokens for name, value in of.items()} for width, of in sums.items()}
    return {width: of | {"perplexity": math.exp(of["perplexity"])} for width, of in means.items()}


def tasks(width: str, count: int, seed: int) -> dict[str, float]:
    """Return the scores of held-out tasks by family, and the accepted share of the draft's tokens."""
    with LLM("embedded", speculation_policy="fixed:4", **WIDTHS[width]) as llm:
        scores = {family: quality(llm, family, count, seed)[0]["all"] for family in FAMILIES}
        speculation = llm.report().speculation
    accepted = speculation.accepted / speculation.drafted if speculation else 0.0
    return scores | {"acceptance": accepted}


def measure(count: int, seed: int, widths: Sequence[str]) -> dict[str, Any]:
    """Return all results by width."""
    with LLM("embedded", draft="none") as llm:
        texts = [text for family in FAMILIES for text in draw_texts(llm, family, count, seed)]
    compared = distributions(
        {width: packaged(WIDTHS[width]) for width in dict.fromkeys([PLAIN, *widths])}, texts
    )
    return {width: {"weights": compared[width], "tasks": tasks(width, count, seed)} for width in widths}


def show(figures: dict[str, Any]) -> None:
    """Print a row for each width in two tables: distributions, and tasks."""
    names = ("perplexity", "divergence", "same greedy token")
    rows = [
        [width, *(f"{measured['weights'][name]:.4f}" for name in names)]
        for width, measured in figures.items()
    ]
    table("Distributions against 16 bits", ["width", *names], rows)
    columns = [*FAMILIES, "acceptance"]
    rows = [
        [width, *(f"{measured['tasks'][name]:.1%}" for name in columns)]
        for width, measured in figures.items()
    ]
    table("Tasks", ["width", *columns], rows)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100, help="held-out replies in each family")
    parser.add_argument("--seed", type=int, default=5, help="seed of the held-out items")
    parser.add_argument("--widths", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    args = parse(parser, count=1, widths=[PLAIN])
    figures = measure(args.count, args.seed, args.widths)
    show(figures)
    print(write("width_quality", vars(args), figures, PACKAGED_PAIR))


if __name__ == "__main__":
    main()
