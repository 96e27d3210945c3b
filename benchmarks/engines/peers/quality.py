"""What each engine's rounding changes: its distributions compared with float32.

Every engine reads the same held-out replies of the packaged model, teacher-forced, with its own arithmetic;
Transformers in float32 gives the reference. `report` compares speeds at equal divergence with the result.

    python -m benchmarks.engines.peers.quality --count 10
"""

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

from benchmarks.engines.peers import setup
from benchmarks.engines.peers.adapters import ALL_OURS, PEERS
from benchmarks.options import parse, results_folder
from benchmarks.packaged.embedded_quality import FAMILIES
from benchmarks.packaged.width_quality import Text, draw_texts, packaged
from benchmarks.report import PACKAGED_PAIR, table, write
from streamserve import LLM, embedded

NAME = "peers_quality"
Distributions = list[np.ndarray[Any, Any]]
"""For each text the log-probabilities [reply tokens, vocabulary]."""


def no_worse(ours: str, peer: str) -> bool:
    """Return whether our engine's divergence is no larger than the peer's as far as the texts can tell: the
    mean of the differences, text by text, is not above 0 by more than its 95 % interval. The result is True
    if either engine was not measured."""
    path = results_folder() / f"{NAME}.json"
    measured = json.loads(path.read_text())["figures"] if path.exists() else {}
    if ours not in measured or peer not in measured:
        return False
    pairs = zip(measured[ours]["by text"], measured[peer]["by text"], strict=True)
    return not significantly_above([a - b for a, b in pairs])


def significantly_above(differences: Sequence[float]) -> bool:
    """Return whether the mean is above 0 by more than 1.96 standard errors."""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) > 1.96 * error


def reference(texts: Sequence[Text]) -> Distributions:
    """Return the distributions of Transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(embedded.path("embedded"), dtype=torch.float32)
    with torch.inference_mode():
        return [
            torch.log_softmax(model(torch.tensor([text.tokens[:-1]])).logits[0, text.first - 1 :], -1).numpy()
            for text in texts
        ]


def of_ours(name: str, texts: Sequence[Text]) -> Distributions:
    """Return the distributions of streamserve with the settings of its engine `name`."""
    reader = packaged(PEERS[name].options)
    return [reader.log_probabilities(text).float().numpy() for text in texts]


def of_peer(name: str, texts: Sequence[Text], folder: Path) -> Distributions:
    """Return the distributions of a peer, which reads in a process under its own Python. Raises RuntimeError
    with the end of its output."""
    peer, cores = PEERS[name], sorted(os.sched_getaffinity(0))
    converted = setup.converted(peer, Path(embedded.path("embedded")), folder, cores)
    with tempfile.TemporaryDirectory() as written:
        order = {
            "converted": str(converted), "options": peer.options, "threads": len(cores), "folder": written,
            "texts": [text.tokens[:-1] for text in texts],
        }  # fmt: skip
        command = [str(setup.python(peer, folder)), "-m", "benchmarks.engines.peers.reading", peer.path]
        log = Path(written) / "log"  # Not a pipe: a pipe would stay open while any process of the peer runs.
        with log.open("w") as output:
            reading = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                env=setup.variables(peer, cores),
                cwd=folder,
                start_new_session=True,
            )
            reading.communicate(json.dumps(order))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(reading.pid, signal.SIGKILL)  # processes of the peer that still run
        if reading.returncode:
            raise RuntimeError(log.read_text()[-600:])
        read = [np.load(Path(written) / f"{i}.npy") for i in range(len(texts))]
    # One prediction for each token of the text. The first reply token is predicted after the prompt's last
    # token.
    return [rows[text.first - 1 :] for rows, text in zip(read, texts, strict=True)]


def compare(exact: Distributions, rounded: Distributions) -> dict[str, Any]:
    """Return the mean divergence (KL, in nats), its means by text, and the share of tokens with the same most
    probable one."""
    by_text, same = [], []
    for p, q in zip(exact, rounded, strict=True):
        p, q = p.astype(np.float64), q.astype(np.float64)
        by_text.append(np.sum(np.exp(p) * (p - q), axis=1))
        same.append(p.argmax(1) == q.argmax(1))
    return {
        "divergence": float(np.concatenate(by_text).mean()),
        "same greedy token": float(np.concatenate(same).mean()),
        "by text": [float(terms.mean()) for terms in by_text],
    }


def measure(
    names: Sequence[str], texts: Sequence[Text], folder: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each engine's results. Engines that fail are printed and left out."""
    exact = reference(texts)
    for name in track(names, description="reading"):
        try:
            ours = name in ALL_OURS
            rounded = of_ours(name, texts) if ours else of_peer(name, texts, folder)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(f"{name} does not read: {getattr(error, 'stderr', None) or error}")
            continue
        yield name, compare(exact, rounded)


def known(settings: Mapping[str, int]) -> dict[str, Any]:
    """Return the recorded results of engines that read the same texts in an earlier run."""
    path = results_folder() / f"{NAME}.json"
    before = json.loads(path.read_text()) if path.exists() else {"settings": {}}
    found: dict[str, Any] = before["figures"] if before["settings"] == settings else {}
    return found


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10, help="number of held-out replies in each family")
    parser.add_argument("--seed", type=int, default=6, help="seed of the held-out items")
    parser.add_argument("--engines", nargs="+", choices=PEERS, default=list(PEERS))
    folder = Path(__file__).parents[3] / "build" / "peers"
    parser.add_argument("--folder", type=Path, default=folder, help="where `setup` has installed the peers")
    args = parse(parser, count=1, engines=list(PEERS)[:1])
    with LLM("embedded", draft="none") as llm:
        texts = [text for family in FAMILIES for text in draw_texts(llm, family, args.count, args.seed)]
    settings = {"count": args.count, "seed": args.seed, "tokens": sum(len(t.tokens) - t.first for t in texts)}
    figures = known(settings) | dict(measure(args.engines, texts, args.folder.resolve()))
    figures = {name: figures[name] for name in PEERS if name in figures}
    rows = [
        [PEERS[name].title, f"{entry['divergence']:.2e}", f"{entry['same greedy token']:.2%}"]
        for name, entry in figures.items()
    ]
    table("Divergence from float32", ["engine", "KL, nats", "same greedy token"], rows)
    print(write(NAME, settings, figures, PACKAGED_PAIR[:1]))


if __name__ == "__main__":
    main()
