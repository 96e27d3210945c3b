"""The packaged model in every format of weights: its greedy tokens by the kernels, which round activations,
compared with the greedy tokens of the same dequantized weights in float32. Teacher-forced, at every token of
held-out replies.

    python -m benchmarks.packaged.format_agreement --count 10

K-quants and IQ4 are made by llama.cpp, where `python -m benchmarks.engines.peers setup --peers llama.cpp` was
run.
"""

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines.peers import setup
from benchmarks.engines.peers.__main__ import FOLDER
from benchmarks.engines.peers.adapters import PEERS
from benchmarks.options import parse, pick
from benchmarks.packaged.embedded_quality import FAMILIES
from benchmarks.packaged.width_quality import BLOCK, MAX_TEXT, Reader, Text, draw_texts
from benchmarks.report import PACKAGED_PAIR, table, write
from streamserve import LLM, embedded
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.compute.passes import ModelPasses
from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.formats.quantization import QuantizedWeight, parse_format
from streamserve.execution.loading.load import load, make_attention
from streamserve.execution.loading.weights import LinearMakers, load_model
from streamserve.execution.model.linear import Linear
from streamserve.protocol.config import ModelConfig
from tests.ggufs import write_gguf
from tests.matrix.cells import FORMATS, Written

WITH_LLAMA_CPP = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")
QUANTIZE = """
import sys, llama_cpp
settings = llama_cpp.llama_model_quantize_default_params()
settings.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + sys.argv[3])
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), settings))
"""


@dataclass
class Compared:
    """Sums over tokens: how often the greedy token is the same, and the divergence of the kernels'
    distributions (KL, in nats)."""

    tokens: int = 0
    same: int = 0
    divergence: float = 0.0

    def add(self, exact: Tensor, rounded: Tensor) -> None:
        """Add the results for these log-probabilities [tokens, vocabulary]."""
        self.tokens += len(exact)
        self.same += int((exact.argmax(-1) == rounded.argmax(-1)).sum())
        self.divergence += float((exact.exp() * (exact - rounded)).sum())

    def figures(self) -> dict[str, float]:
        """Return the means over all tokens."""
        return {"same greedy token": self.same / self.tokens, "divergence": self.divergence / self.tokens}


def formats(folder: Path) -> Iterator[tuple[str, Written]]:
    """Write the packaged model in each format; yield the format's name and the folder."""
    made = {name: write for name, write in FORMATS.items() if "K_M" not in name and "IQ4" not in name}
    for name, write_in in made.items():
        source, target = folder / name.replace(" ", "-") / "source", folder / name.replace(" ", "-")
        shutil.copytree(embedded.path("embedded"), source)
        yield name, write_in(source, target)
    python = setup.python(PEERS["llama.cpp"], FOLDER)
    if not python.exists():
        print("no K-quants: python -m benchmarks.engines.peers setup --peers llama.cpp")
        return
    write_gguf(embedded.path("embedded"), folder / "16.gguf", "BF16")
    for name in WITH_LLAMA_CPP:
        file = folder / f"{name}.gguf"
        command = [str(python), "-c", QUANTIZE, str(folder / "16.gguf"), str(file), name]
        subprocess.run(command, check=True, capture_output=True)
        yield f"GGUF {name}", Written(file)


def kernels(written: Written) -> Reader:
    """Return the model as a server loads it."""
    config = ModelConfig(
        path=str(written.path), draft="none", num_blocks=MAX_TEXT // BLOCK, block_size=BLOCK,
        max_model_len=MAX_TEXT, **written.settings,
    )  # fmt: skip
    loaded = load(config)
    return Reader(ModelPasses(loaded.model, make_attention(loaded.cache, loaded.model.spec, loaded.pool)))


def dequantized(written: Written) -> Reader:
    """Return the model with its dequantized weights in float32."""

    def dense(weight: Any, bias: Tensor | None = None) -> Linear:
        return Linear(weight.floats() if isinstance(weight, QuantizedWeight) else weight, bias)

    spec, checkpoint = open_checkpoint(written.path)
    makers = LinearMakers(dense, dense, dense, dense)
    model = load_model(
        checkpoint,
        spec,
        torch.float32,
        makers,
        format=parse_format(written.settings.get("quantization", "none")),
    )
    cache = KVCache(spec, MAX_TEXT // BLOCK, BLOCK, torch.float32)
    return Reader(ModelPasses(model, make_attention(cache, spec, None)))


def compare(written: Written, texts: list[Text]) -> dict[str, float]:
    """Return the results of one format."""
    exact, served, compared = dequantized(written), kernels(written), Compared()
    for text in texts:
        compared.add(exact.log_probabilities(text), served.log_probabilities(text))
    return compared.figures()


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10, help="held-out replies in each family")
    parser.add_argument("--seed", type=int, default=5, help="seed of the held-out items")
    args = parse(parser, count=1)
    with LLM("embedded", draft="none") as llm:
        texts = [
            text
            for family in pick(list(FAMILIES), list(FAMILIES)[:1])
            for text in draw_texts(llm, family, args.count, args.seed)
        ]
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, written in islice(formats(Path(folder)), pick(None, 2)):
            measured[name] = compare(written, texts)
            print(f"{name}: {measured[name]}", flush=True)
    rows = [[name, *(f"{value:.4f}" for value in of.values())] for name, of in measured.items()]
    table("Against dequantized weights in float32", ["format", "same greedy token", "divergence"], rows)
    print(write("format_agreement", vars(args), measured, PACKAGED_PAIR))


if __name__ == "__main__":
    main()
