"""Several workers: memory of the weights, a step with shared weights, throughput compared with one worker."""

from statistics import median

from benchmarks.figures.files import figures

from .base import Row, table


@table("workers/memory", "workers")
def memory() -> tuple[Row, list[Row]]:
    """Return the memory of a server's workers with private and with shared weights."""
    rows = []
    for name, one in figures("workers")["memory"].items():
        private, shared = one["private"], one["shared"]
        rows.append([
            name,
            f"{shared['weights_mb']:.0f}",
            f"{private['pss_mb']:,.0f}",
            f"{shared['pss_mb']:,.0f}",
            f"{private['restart_s']:.1f}",
            f"{shared['restart_s']:.1f}",
        ])  # fmt: skip
    head = [
        "server",
        "weights, MB",
        "private: PSS, MB",
        "shared: PSS, MB",
        "restart, s",
        "shared: restart, s",
    ]
    return head, rows


@table("workers/starts", "starts")
def starts() -> tuple[Row, list[Row]]:
    """Return how long workers take to start, as new processes and as forked processes."""
    rows = [
        [name, *(f"{one[way]:.2f}" if one[way] < 100 else f"{one[way]:.0f}" for way in ("started", "forked"))]
        for name, one in figures("starts")["median"].items()
    ]
    return ["seconds", "new processes", "forked"], rows


@table("workers/step", "workers")
def step() -> tuple[Row, list[Row]]:
    """Return the time of a step and of loading the weights."""
    one = figures("workers")["step"]
    load = one["load_s"]
    row = [f"{one['private_ms']:.1f}", f"{one['shared_ms']:.1f}", f"{one['ratio']:.2f}"]
    row += [f"{load[name]:.2f}" for name in ("private", "written", "mapped")]
    return ["private: step, ms", "shared, ms", "ratio", "load private, s", "load and share, s", "map, s"], [
        row
    ]


@table("workers/throughput", "workers")
def throughput() -> tuple[Row, list[Row]]:
    """Return tokens a second of one worker and of two workers: in the round that other programs disturbed
    least, and in the median round."""
    rounds = figures("workers")["throughput"]
    rows = []
    for case in [case for case in rounds[0]["one worker"] if case != "others"]:
        one, two = ([run[name][case] for run in rounds] for name in ("one worker", "--workers 2"))
        rows.append([
            case,
            f"{max(one):.0f}",
            f"{max(two):.0f}",
            f"{max(two) / max(one):.2f}",
            f"{median(one):.0f}",
            f"{median(two):.0f}",
            f"{median(two) / median(one):.2f}",
        ])  # fmt: skip
    head = ["burst", "one worker", "--workers 2", "ratio", "median: one worker", "--workers 2", "ratio"]
    return head, rows


@table("workers/decisions", "fleet_scale")
def decisions() -> tuple[Row, list[Row]]:
    """Return how long the decisions of a large fleet take."""
    rows = [
        [kind, f"{of['count']:,}", f"{1e6 * of['median']:.0f}", f"{1e6 * of['p99']:.0f}"]
        for kind, of in figures("fleet_scale")["seconds"].items()
    ]
    return ["event", "events", "median, µs", "99 %, µs"], rows


@table("workers/quota", "quota")
def quota() -> tuple[Row, list[Row]]:
    """Return threads and speeds within a CPU quota and on one processor."""
    cases = figures("quota")
    work = [name for name in next(iter(cases.values())) if name != "threads"]
    rows = [
        [name, f"{one['threads']:.0f}", *(f"{one[what]:.0f}" for what in work)] for name, one in cases.items()
    ]
    return ["limit", "threads", *work], rows
