"""The model card, written from what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from .evaluate import Report
from .losses import EXIT_WEIGHT, EXITS, KL_SHARE
from .model import DRAFT, TARGET, Llama, Shape

TEMPLATE = Path(__file__).parent / "card.md"


def _shapes() -> str:
    rows: list[tuple[str, str]] = [
        ("hidden size", "hidden"),
        ("layers", "layers"),
        ("heads", "heads"),
        ("key/value heads", "kv_heads"),
        ("feed-forward size", "ffn"),
    ]
    lines = [f"| {label} | {getattr(TARGET, name)} | {getattr(DRAFT, name)} |" for label, name in rows]
    return "\n".join([*lines, f"| parameters | {_parameters(TARGET):,} | {_parameters(DRAFT):,} |"])


def _parameters(shape: Shape) -> int:
    return sum(weight.numel() for weight in Llama(shape).parameters())


def _figures(report: Report) -> str:
    names = ["score", "draft", *(f"self:{layers}" for layers in EXITS)]
    lines = [f"| family | replies | {' | '.join(names)} |", "| --- |" + " --- |" * (len(names) + 1)]
    for family, figures in report.items():
        shown = " | ".join(f"{figures[name]:.1%}" for name in names)
        lines.append(f"| {family} | {figures['replies']:.0f} | {shown} |")
    return "\n".join(lines)


def _kinds(report: Report) -> str:
    return "; ".join(
        f"{family}: "
        + ", ".join(
            f"{name.removeprefix('check ')} {value:.0%}" for name, value in figures.items() if "check" in name
        )
        for family, figures in report.items()
    )


def write(work: Path, path: Path) -> None:
    """Write the card from ``evaluation.json`` and the two checkpoints' progress."""
    report: Report = json.loads((work / "evaluation.json").read_text(encoding="utf-8"))
    target, draft = (
        torch.load(work / f"{name}.pt", weights_only=True)["progress"] for name in ("target", "draft")
    )
    minutes = target["seconds"] / 60
    path.write_text(
        TEMPLATE.read_text(encoding="utf-8").format(
            shapes=_shapes(),
            vocab=TARGET.vocab,
            target_tokens=target["tokens"] / 1e6,
            target_minutes=minutes,
            target_rate=target["tokens"] / target["seconds"],
            exits=" and ".join(map(str, EXITS)),
            exit_weight=EXIT_WEIGHT,
            draft_minutes=draft["seconds"] / 60,
            draft_tokens=draft["tokens"] / 1e6,
            kl=KL_SHARE,
            ce=1 - KL_SHARE,
            figures=_figures(report),
            kinds=_kinds(report),
            longer=max(minutes * 2, 150),
        ),
        encoding="utf-8",
    )
    print(f"wrote {path}", flush=True)
