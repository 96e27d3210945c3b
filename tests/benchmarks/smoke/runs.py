"""Smoke runs: every benchmark executes its whole code path with `--smoke`, with the fewest counts.

Small runs contain the benchmarks that need no server: simulations, kernels, and engines in this process.
Benchmarks with servers, workers or machines run with `--full`. Where a benchmark needs other engines, a GPU
or a wheel, only its command line is parsed.
"""

IN_PROCESS = {
    "benchmarks.papers.slo --sweep rate": "slo_rate_here.json",
    "benchmarks.papers.slo --sweep loose --settings goodput": "slo_loose_here.json",
    "benchmarks.papers.slo --sweep share --settings goodput": "slo_share_here.json",
    "benchmarks.papers.slo --sweep scale --settings goodput --hardware h200": "slo_scale_h200.json",
    "benchmarks.papers.slo_costs": "costs.json",
    "benchmarks.papers.specustream": "specustream.json",
    "benchmarks.papers.specustream_virtual": "specustream_virtual.json",
    "benchmarks.papers.streamserve": "streamserve_a100.json",
    "benchmarks.papers.pairs": "pairs.json",
    "benchmarks.papers.pair_streams": "pair_streams.json",
    "benchmarks.papers.streaming": "streaming-append-main.json",
    "benchmarks.speculation.speculation": "speculation.json",
    "benchmarks.speculation.record_acceptance --texts 2": "acceptance.npz",
    "benchmarks.speculation.wrong_profiles": "wrong_profiles.json",
    "benchmarks.kernels.kernels": "kernels-",
    "benchmarks.kernels.widths": "widths-",
    "benchmarks.kernels.attention": "attention-",
    "benchmarks.overhead.fleet_scale": "fleet_scale.json",
    "benchmarks.overhead.host_cost": "host_cost.json",
    "benchmarks.overhead.lora": "lora.json",
    "benchmarks.overhead.workers --model {model} --parts step": "workers.json",
}
"""Command lines, and the beginning of the name of a file that each writes."""

LONG = {
    "benchmarks.papers.streaming --parts update-tight": "streaming-update-tight-main.json",
    "benchmarks.papers.slo_live": "slo_live.json",
    "benchmarks.papers.pair_streams --live": "pair_streams_live.json",
    "benchmarks.papers.pairs_live": "pairs_live.json",
    "benchmarks.papers.routers_live": "routers_live.json",
    "benchmarks.papers.streamserve_live": "streamserve_live.json",
    "benchmarks.papers.star": "star.json",
    "benchmarks.papers.star_live": "star_live.json",
    "benchmarks.speculation.speculation --acceptance": "speculation.json",
    "benchmarks.overhead.cluster_load": "cluster_load.json",
    "benchmarks.overhead.workers --model {model}": "workers.json",
    "benchmarks.packaged.embedded_quality": "embedded_quality.json",
    "benchmarks.packaged.format_agreement": "format_agreement.json",
    "benchmarks.packaged.inflated": "inflated.json",
    "benchmarks.packaged.starts": "starts.json",
    "benchmarks.packaged.width_quality": "width_quality.json",
    "benchmarks.robustness.hostile": "hostile.json",
}
"""Runs of many seconds, most of them with servers. They run only with `--full`."""

WITH_NAMESPACES = {
    "benchmarks.papers.pair_hosts": "pair_hosts.json",
    "benchmarks.papers.star_hosts": "star_hosts.json",
}
"""Runs that need network namespaces. They run with `--full`, where namespaces are permitted."""

COMMAND_LINE_ONLY = {
    "benchmarks.engines.peers.__main__": "other engines",
    "benchmarks.engines.peers.quality": "other engines",
    "benchmarks.kernels.gpu": "a GPU",
    "benchmarks.kernels.packaged_kernels": "a wheel",
    "benchmarks.packaged.first_hour": "a wheel, and downloads",
}
"""Benchmarks whose requirements tests cannot meet, by requirement. Only their command lines are parsed."""

SEPARATE_TESTS = {
    "engines.peers_speculation": "reports given rounds: measuring needs other engines",
    "kernels.mixture": "writes a mixture: comparing it needs llama.cpp",
    "papers.streaming_evictions": "runs with `--full` against a server",
    "robustness.machine_faults": "runs with `--full`, where network namespaces are permitted",
    "robustness.quota": "runs with `--full`, where control groups can be made",
}
"""Benchmarks with a separate test, and the test's file. Module names are given without the package, so that
the tests of the tables above do not depend on these files."""


def named_benchmarks() -> set[str]:
    """Return the modules of all tables."""
    commands = [*IN_PROCESS, *LONG, *WITH_NAMESPACES, *COMMAND_LINE_ONLY]
    named = {command.split()[0].removesuffix(".__main__") for command in commands}
    return named | {f"benchmarks.{name}" for name in SEPARATE_TESTS}
