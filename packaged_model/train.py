"""Train the embedded pair from nothing: chats, tokenizer, target, distilled draft, evaluation, model card."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

# Threads that wait by spinning starve each other on a shared machine; this must be set before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
from embedded_training import card, corpus, fused, induction, tokenizer
from embedded_training.evaluate import evaluate, show
from embedded_training.export import export, restore
from embedded_training.losses import DraftLoss, TargetLoss
from embedded_training.model import DRAFT, TARGET, Llama
from embedded_training.optim import Optimisers
from embedded_training.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("corpus", "target", "draft", "export", "evaluate", "card")
EPILOG = """\
stages, in order (each is skipped over or resumed when its files exist in the work folder):
  corpus    draw chats, train the tokenizer, write token files
  target    train the target on the text; the rate falls to zero exactly at the end of --minutes
  draft     distil the draft from the target for --draft-minutes
  export    write both as Hugging Face folders below --out
  evaluate  score new chats and the draft's agreement; writes evaluation.json in the work folder
  card      write MODEL_CARD.md from what was measured

examples:
  everything, one command:      python packaged_model/train.py
  a quick look, five minutes:   python packaged_model/train.py --minutes 3 --draft-minutes 1 \\
                                    --tokens 2000000 --work build/quick --out build/quick/out
  stopped? the same command goes on from the last checkpoint.
  train a finished target on:   python packaged_model/train.py --stage target --minutes 240
                                (a larger budget than before: the rate rises to where the longer schedule
                                stands and falls to zero again), then --stage draft --fresh and --stage export
  train the shipped target on:  python packaged_model/train.py --start src/streamserve/embedded --seed 2
                                (new chats; its tokenizer and weights are taken over)
  measure only:                 python packaged_model/train.py --evaluate --count 100
"""


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=STAGES, help="run this stage alone instead of all of them")
    parser.add_argument("--evaluate", action="store_true", help="short for --stage evaluate")
    parser.add_argument(
        "--minutes", type=float, default=75.0, help="training budget of the target (default: %(default)s)"
    )
    parser.add_argument(
        "--draft-minutes", type=float, default=18.0, help="budget of the draft (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=30_000_000, help="size of the corpus (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: %(default)s)")
    parser.add_argument(
        "--count",
        type=int,
        default=25,
        help="chats to score per family and split (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the corpus and weights (default: %(default)s)"
    )
    parser.add_argument(
        "--start", type=Path, help="begin with this exported pair's tokenizer and target, not from nothing"
    )
    parser.add_argument("--fresh", action="store_true", help="drop the stage's checkpoint and start it again")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "embedded", help="checkpoints and token files"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "src" / "streamserve" / "embedded", help="where to export"
    )
    return parser.parse_args(argv)


def _load(work: Path, name: str) -> Llama:
    """A model from its checkpoint, whether or not its training has ended."""
    model = Llama(TARGET if name == "target" else DRAFT)
    saved = torch.load(work / f"{name}.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    return model.eval()


def make_corpus(args: argparse.Namespace) -> bool:
    """The tokenizer and token files, unless they exist."""
    vocabulary = args.work / "tokenizer.json"
    if args.start and not vocabulary.exists():
        shutil.copyfile(args.start / "target" / "tokenizer.json", vocabulary)
    if not vocabulary.exists():
        print("training the tokenizer", flush=True)
        tokenizer.train(vocabulary)
    for split, size, seed in (("heldout", 200_000, args.seed + 6), ("train", args.tokens, args.seed)):
        if args.fresh or not (args.work / split / "starts.npy").exists():
            corpus.build(args.work / split, vocabulary, split, size, seed)
    return True


def train(args: argparse.Namespace, name: str) -> bool:
    """Train one model to the end of its budget; false when it was stopped before."""
    checkpoint = args.work / f"{name}.pt"
    if args.fresh:
        checkpoint.unlink(missing_ok=True)
    torch.manual_seed(args.seed)
    fused.enable()
    model = Llama(TARGET if name == "target" else DRAFT)
    minutes = args.minutes if name == "target" else args.draft_minutes
    loss = TargetLoss(model) if name == "target" else DraftLoss(model, _load(args.work, "target"))
    rows = corpus.Rows(args.work / "train")
    if not checkpoint.exists() and args.start and name == "target":
        restore(model, args.start / name)
    elif not checkpoint.exists():
        induction.plant(model, rows.take(48, 256, 0)[0][:, :-1])
    trainer = Trainer(model, Optimisers(model), rows, checkpoint, minutes)
    return trainer.run(loss)


def run(args: argparse.Namespace, stage: str) -> bool:
    """One stage; false when it did not finish."""
    print(f"== {stage}", flush=True)
    if stage == "corpus":
        return make_corpus(args)
    if stage in ("target", "draft"):
        return train(args, stage)
    if stage == "export":
        for name in ("target", "draft"):
            export(_load(args.work, name), args.work / "tokenizer.json", args.out / name)
        return True
    if stage == "evaluate":
        show(evaluate(_load(args.work, "target"), _load(args.work, "draft"), args.work, args.count))
        return True
    card.write(args.work, args.out / "MODEL_CARD.md")
    return True


def main(argv: list[str] | None = None) -> int:
    """Run the chosen stage or all of them."""
    args = options(argv)
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    stages = ("evaluate",) if args.evaluate else (args.stage,) if args.stage else STAGES
    return 0 if all(run(args, stage) for stage in stages) else 130


if __name__ == "__main__":
    sys.exit(main())
