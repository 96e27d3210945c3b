"""Write benchmark results: the metadata common to all, and the result files."""

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import render_pages
from benchmarks.options import results_folder, smoke
from streamserve import __version__, embedded
from streamserve.execution.formats.checkpoint import Checkpoint
from streamserve.execution.loading.loaded import open_source
from streamserve.execution.model.spec import read_spec
from streamserve.protocol.config import ModelConfig

PACKAGED_PAIR = ("embedded", "embedded-draft")
"""The models of benchmarks that run the packaged pair, or checkpoints inflated from it."""
SIMULATED: tuple[str, ...] = ()
"""The models of benchmarks that run no model: simulations and single kernels."""


def machine() -> dict[str, Any]:
    """Return the processor's name, and how many of its cores this process may use."""
    name = platform.processor()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return {"processor": name, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def commit() -> str:
    """Return the checked-out commit, with a + if tracked files differ from it."""
    head = git("rev-parse", "--short=12", "HEAD")
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def stamp(model: str) -> dict[str, str]:
    """Return fingerprint and precision of a packaged model or a checkpoint folder; `unknown` for other
    models."""
    folder = Path(model) if Path(model).is_dir() else None
    if folder is None and model in PACKAGED_PAIR:
        folder = embedded.path(model)
    if folder is None:
        return {"fingerprint": "unknown", "precision": "unknown"}
    source = open_source(ModelConfig(path=str(folder), draft="none"), Checkpoint(folder), read_spec(folder))
    return {"fingerprint": source.fingerprint, "precision": str(source.dtype).removeprefix("torch.")}


def git(*arguments: str) -> str:
    """Return the output of git, run in the current directory; `unknown` where there is no git."""
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def write(name: str, settings: Mapping[str, Any], figures: Any, models: Sequence[str]) -> Path:
    """Write `results/NAME.json` with machine, commit, settings and the models that were run, and render the
    pages that show it; returns its path. A smoke run renders no page."""
    results_folder().mkdir(exist_ok=True)
    path = results_folder() / f"{name}.json"
    report = {
        "benchmark": name,
        "version": __version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "models": {name: stamp(name) for name in models},
        "settings": dict(settings),
        "figures": figures,
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    if not smoke():
        render_pages()
    return path


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    shown = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        shown.add_column(column, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)
