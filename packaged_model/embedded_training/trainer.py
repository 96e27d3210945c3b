"""The training loop both models share: a budget in minutes, progress lines, checkpoints, a clean Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

from .corpus import Rows
from .optim import Optimisers, schedule

Loss = Callable[[Tensor, Tensor, float], tuple[Tensor, float]]
TOKENS_PER_STEP = 6144
PROMPT_SHARE = 0.12  # the share of prompt tokens that are learned next to all reply tokens


@dataclass
class Progress:
    """How far a run has come; saved with every checkpoint."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    chat: int = 0
    losses: list[float] = field(default_factory=list)


def chosen(mask: Tensor) -> Tensor:
    """Flat positions whose next token is learned: every reply token and a few prompt tokens."""
    targets = mask[:, 1:].reshape(-1)
    return torch.nonzero((targets > 0) | (torch.rand(targets.shape) < PROMPT_SHARE)).squeeze(1)


def row_length(share: float, step: int) -> int:
    """Short rows first, because they train faster; later longer ones, up to 2,048 tokens."""
    if share < 0.7:
        return 1024 if step % 20 == 19 else 256
    return {19: 2048, 9: 1024}.get(step % 20, 512)


class Trainer:
    """Runs ``loss`` over the corpus until the budget is spent, wherever the last run stopped."""

    def __init__(
        self, model: nn.Module, optimisers: Optimisers, rows: Rows, checkpoint: Path, minutes: float
    ) -> None:
        self.model, self.optimisers, self.rows = model, optimisers, rows
        self.checkpoint, self.budget = checkpoint, minutes * 60
        self.progress = Progress()
        self.stopped = False
        if checkpoint.exists():
            self._restore()

    def _restore(self) -> None:
        saved = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimisers.load_state_dict(saved["optimisers"])
        self.progress = Progress(**saved["progress"])
        print(f"resumed {self.checkpoint.name} after {self.progress.seconds / 60:.1f} minutes", flush=True)

    def save(self) -> None:
        """Write the checkpoint in one step, so that a stop never leaves half a file."""
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.checkpoint.with_suffix(".new")
        state = {
            "model": self.model.state_dict(),
            "optimisers": self.optimisers.state_dict(),
            "progress": vars(self.progress),
        }
        torch.save(state, fresh)
        fresh.replace(self.checkpoint)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        print("stopping after this step; the same command goes on from here", flush=True)

    def _batch(self, share: float) -> tuple[Tensor, Tensor]:
        length = row_length(share, self.progress.steps)
        ids, mask, self.progress.chat = self.rows.take(TOKENS_PER_STEP // length, length, self.progress.chat)
        return ids, mask

    def run(self, loss: Loss, every: float = 300.0) -> bool:
        """Train to the end of the budget; true when it was reached."""
        handlers = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        progress, last = self.progress, time.monotonic()
        next_save, next_print = progress.seconds + every, progress.seconds
        while progress.seconds < self.budget and not self.stopped:
            share = progress.seconds / self.budget
            ids, mask = self._batch(share)
            value, shown = loss(ids, mask, share)
            value.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimisers.step(schedule(share))
            now = time.monotonic()
            progress.seconds, last = progress.seconds + now - last, now
            progress.steps += 1
            progress.tokens += ids.shape[0] * (ids.shape[1] - 1)
            progress.losses = [*progress.losses[-49:], shown]
            if progress.seconds >= next_print:
                self._print()
                next_print = progress.seconds + 10
            if progress.seconds >= next_save:
                self.save()
                next_save = progress.seconds + every
        self.save()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return not self.stopped

    def _print(self) -> None:
        p = self.progress
        mean, rate = sum(p.losses) / len(p.losses), p.tokens / max(p.seconds, 1e-9)
        left = max(self.budget - p.seconds, 0.0) / 60
        print(
            f"step {p.steps:,}  tokens {p.tokens / 1e6:.2f} M  loss {mean:.4f}  {rate:,.0f} tok/s  "
            f"{p.seconds / 60:.1f} min, {left:.1f} min left",
            flush=True,
        )
