"""Measures a model and its draft model on this machine; stores and shows the profiles."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from streamserve.execution.profile.lock import exclusive_measurement
from streamserve.execution.profile.profile import Profile, ProfileStore, user_profiles
from streamserve.fleet.worker_process import WORKER_ENVIRONMENT
from streamserve.settings.options import Settings
from streamserve.system.instructions import pytorch_bounds
from streamserve.system.processors import usable_processors

WAIT_SECONDS = 120.0
"""Seconds to wait for other processes that are measuring."""


def run(settings: Settings) -> None:
    """Measure, store and print the profiles.

    Raises CheckpointError if a model cannot be served, OSError if a profile cannot be stored.
    """
    for name, value in (WORKER_ENVIRONMENT | pytorch_bounds()).items():
        os.environ.setdefault(name, value)  # before torch is imported, as in a worker
    console, store = Console(), user_profiles()
    for profile in _measure(settings, store):
        path = store.write(profile)
        show(profile, console)
        console.print(f"profile: {path}", soft_wrap=True, highlight=False)
        if plot(profile, path.with_suffix(".png")):
            console.print(f"plot: {path.with_suffix('.png')}", soft_wrap=True, highlight=False)
        else:
            console.print("no plot, as matplotlib is not installed")


def _measure(settings: Settings, store: ProfileStore) -> list[Profile]:
    """Measure the model, and its draft model if it has one, with a progress bar.

    Runs on reserved cores if there are any, as a worker does.
    """
    from streamserve.execution.backends.native.cores import reserve_cores
    from streamserve.execution.drafters.choice import choose_draft
    from streamserve.execution.loading.load import load
    from streamserve.execution.profile.measure import FULL, measure

    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"loading {settings.name}", total=None)
        plain = msgspec.structs.replace(settings.model, draft="none")
        reserved = reserve_cores(plain.threads or usable_processors().threads)
        cores = reserved.cpus if reserved else ()
        target = load(plain, cores=cores)
        models = [(settings.name, target)]
        draft = choose_draft(settings.model.draft, Path(plain.path), target.model.spec)
        if draft.spec:
            limit = min(target.model_info.max_model_len, draft.spec.max_position_embeddings)
            dtype = target.model_info.dtype
            draft_config = msgspec.structs.replace(
                plain, path=str(draft.folder), dtype=dtype, max_model_len=limit, quantization="none"
            )
            models.append((f"draft of {settings.name}", load(draft_config, cores=cores)))
        if target.pool is not None and cores:
            os.sched_setaffinity(0, cores[:1])  # the main thread's core
        progress.update(bar, description="waiting for other processes that are measuring")
        with exclusive_measurement(store.folder, WAIT_SECONDS) as exclusive:
            progress.update(bar, description="measuring")
            profiles = measure(
                models,
                FULL,
                lambda done, total: progress.update(bar, completed=done, total=total),
                stable=exclusive,
            )
        progress.update(bar, completed=1, total=1)
    return profiles


def show(profile: Profile, console: Console) -> None:
    """Print the profile as a table: milliseconds per step, and the lower bound as a share of each."""
    for line in _heading(profile):
        console.print(line, soft_wrap=True, highlight=False)
    contexts = [kv_bytes // profile.kv_token_bytes for kv_bytes in profile.cost.kv_bytes]
    table = Table()
    table.add_column("tokens", justify="right")
    for context in contexts:
        table.add_column(f"{context}", justify="right")
    table.add_column("× one token", justify="right")
    for tokens, seconds, floors in zip(profile.cost.tokens, profile.cost.seconds, profile.floor, strict=True):
        cells = [f"{1e3 * t:.2f} ({floor / t:.0%})" for t, floor in zip(seconds, floors, strict=True)]
        table.add_row(str(tokens), *cells, f"{seconds[0] / profile.cost.seconds[0][0]:.2f}")
    console.print(table)


def _heading(profile: Profile) -> list[str]:
    subject, machine = profile.subject, profile.subject.machine
    weights, kv = profile.weight_bytes / 1e6, profile.kv_token_bytes / 1e3
    return [
        "",
        f"{profile.model} in {subject.dtype}, {subject.backend}; medians of {profile.rounds} rounds",
        *(
            []
            if profile.stable
            else ["unstable: other processes were computing, or rounds differed; measure again"]
        ),
        f"{machine.processor}, {machine.threads} threads on {machine.cores} cores",
        f"{profile.bandwidth / 1e9:.1f} GB/s of memory, "
        f"{profile.matrix_rate / 1e9:.0f} GFLOP/s of matrix products{_multipliers(profile)}",
        f"{weights:.1f} MB of weights per step, {kv:.1f} kB of KV per token",
        *_swapping(profile),
        "ms per step (lower bound / measured), by query tokens and tokens of context:",
    ]


def _multipliers(profile: Profile) -> str:
    """Return the rate of the multipliers, if it is known, as a part of a line."""
    if not profile.multiplier_rate:
        return ""
    return f" of at most {profile.multiplier_rate / 1e9:.0f} that the processor's multipliers allow"


def _swapping(profile: Profile) -> list[str]:
    """Return a line with the time to swap KV out and back, by the fitted cost model; no line if it was not
    measured."""
    if profile.swap is None:
        return []
    megabyte = 1 << 20
    out, back = 1e3 * profile.swap.out(megabyte), 1e3 * profile.swap.back(megabyte)
    return [f"swapping 1 MiB of KV: {out:.2f} ms out, {back:.2f} ms back"]


def plot(profile: Profile, path: Path) -> bool:
    """Plot step times and their lower bounds over query tokens, one line per context. Return False without
    matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return False
    figure, axes = plt.subplots(figsize=(7, 4.5))
    tokens = profile.cost.tokens
    for column, kv_bytes in enumerate(profile.cost.kv_bytes):
        (line,) = axes.plot(
            tokens,
            _milliseconds(profile.cost.seconds, column),
            marker=".",
            label=f"{kv_bytes // profile.kv_token_bytes} tokens of context",
        )
        axes.plot(tokens, _milliseconds(profile.floor, column), color=line.get_color(), linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="query tokens", ylabel="ms per step (dotted: lower bound)")
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.set_title(f"{profile.model}, {profile.subject.dtype}, {profile.subject.backend}", fontsize=9)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _milliseconds(grid: Sequence[Sequence[float]], column: int) -> list[float]:
    return [1e3 * line[column] for line in grid]
