"""`streamserve profile`: measure a model and its draft model on this machine; store and show the profile."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from streamserve.execution.profile.lock import alone
from streamserve.execution.profile.profile import Kept, Profile, users_profiles
from streamserve.fleet.worker_process import WORKER_ENVIRONMENT
from streamserve.settings.resolve import Settings

WAIT_SECONDS = 120.0
"""How long to wait for other processes that are measuring."""


def run(settings: Settings) -> None:
    """Measure, store and print the profiles.

    Raises CheckpointError for a model that cannot be served, OSError if a profile cannot be stored.
    """
    for name, value in WORKER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # before torch is imported: as in a worker
    screen, kept = Console(), users_profiles()
    for profile in _measure(settings, kept):
        path = kept.write(profile)
        show(profile, screen)
        screen.print(f"kept in {path}", soft_wrap=True, highlight=False)
        if plot(profile, path.with_suffix(".png")):
            screen.print(f"plot in {path.with_suffix('.png')}", soft_wrap=True, highlight=False)
        else:
            screen.print("no plot: matplotlib is not installed")


def _measure(settings: Settings, kept: Kept) -> list[Profile]:
    """Measure the model, and its draft model if it has one, with a progress bar.

    Runs on reserved cores if there are any, as in a worker.
    """
    from streamserve.execution.cores import claim
    from streamserve.execution.drafters.choice import choose_draft
    from streamserve.execution.load import load
    from streamserve.execution.profile.measure import FULL, measure

    with Progress(console=Console(stderr=True)) as bars:
        bar = bars.add_task(f"loading {settings.name}", total=None)
        plain = msgspec.structs.replace(settings.model, draft="none")
        cores = claim(plain.threads or len(os.sched_getaffinity(0)))
        numbers = cores.numbers if cores else ()
        target = load(plain, cores=numbers)
        models = [(settings.name, target)]
        draft = choose_draft(settings.model.draft, Path(plain.path), target.model.spec)
        if draft.spec:
            limit = min(target.model_info.max_model_len, draft.spec.max_position_embeddings)
            dtype = target.model_info.dtype
            own = msgspec.structs.replace(plain, path=str(draft.folder), dtype=dtype, max_model_len=limit)
            models.append((f"draft of {settings.name}", load(own, cores=numbers)))
        if target.team is not None and numbers:
            os.sched_setaffinity(0, numbers[:1])  # the main thread's core
        bars.update(bar, description="waiting until no other process measures")
        with alone(kept.folder, WAIT_SECONDS) as undisturbed:
            bars.update(bar, description="measuring")
            profiles = measure(
                models,
                FULL,
                lambda done, total: bars.update(bar, completed=done, total=total),
                stable=undisturbed,
            )
        bars.update(bar, completed=1, total=1)
    return profiles


def show(profile: Profile, screen: Console) -> None:
    """Print the profile as a table: milliseconds per step, and the floor's share of them."""
    for line in _heading(profile):
        screen.print(line, soft_wrap=True, highlight=False)
    contexts = [held // profile.kv_token_bytes for held in profile.cost.kv_bytes]
    table = Table()
    table.add_column("rows", justify="right")
    for context in contexts:
        table.add_column(f"{context}", justify="right")
    table.add_column("× one row", justify="right")
    for rows, seconds, floors in zip(profile.cost.tokens, profile.cost.seconds, profile.floor, strict=True):
        cells = [f"{1e3 * t:.2f} ({low / t:.0%})" for t, low in zip(seconds, floors, strict=True)]
        table.add_row(str(rows), *cells, f"{seconds[0] / profile.cost.seconds[0][0]:.2f}")
    screen.print(table)


def _heading(profile: Profile) -> list[str]:
    subject, machine = profile.subject, profile.subject.machine
    weights, kv = profile.weight_bytes / 1e6, profile.kv_token_bytes / 1e3
    return [
        "",
        f"{profile.model} in {subject.dtype}, {subject.backend}; medians of {profile.rounds} rounds",
        *(
            []
            if profile.stable
            else ["unstable: others computed meanwhile, or rounds differed; measure again"]
        ),
        f"{machine.processor}, {machine.threads} threads on {machine.cores} cores",
        f"{profile.bandwidth / 1e9:.1f} GB/s of memory, {profile.matrix_rate / 1e9:.0f} GFLOP/s of matrices",
        f"{weights:.1f} MB of weights a step, {kv:.1f} kB of KV a token",
        *_swapping(profile),
        "ms a step (share of its floor), by query rows and tokens of context held:",
    ]


def _swapping(profile: Profile) -> list[str]:
    """Return a line with the time to swap KV out and back, by the fitted cost model; none if not measured."""
    if profile.swap is None:
        return []
    megabyte = 1 << 20
    out, back = 1e3 * profile.swap.out(megabyte), 1e3 * profile.swap.back(megabyte)
    return [f"a MiB of KV swapped out in {out:.2f} ms, back in {back:.2f} ms"]


def plot(profile: Profile, path: Path) -> bool:
    """Plot step time and floor over rows, a line per context; return False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return False
    figure, axes = plt.subplots(figsize=(7, 4.5))
    tokens = profile.cost.tokens
    for column, held in enumerate(profile.cost.kv_bytes):
        (line,) = axes.plot(
            tokens,
            _milliseconds(profile.cost.seconds, column),
            marker=".",
            label=f"{held // profile.kv_token_bytes} tokens held",
        )
        axes.plot(tokens, _milliseconds(profile.floor, column), color=line.get_color(), linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="query rows", ylabel="ms a step (dotted: floor)")
    axes.set_xticks(tokens, [str(rows) for rows in tokens])
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
