"""One draft model for N targets: throughput, waiting and idle time, load, and the analytical prediction of
each.

The service is real, with a draft model inflated so that drafting for one target takes some milliseconds. The
targets are paced (star_rig.py): a sleep makes the ratio Z/S 4 while the service is busy. Measured are a
service that drafts for one target at a time and one that batches, with and without keep-warm, and one that
has died; and for comparison targets without a draft and with separate draft models. All runs are on loopback;
star_hosts.py measures hosts and a wire, star_live.py real targets.

    python -m benchmarks.papers.star --seconds 4
"""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.options import parse, pick, results_folder
from benchmarks.papers.star_rig import (
    DEPTH,
    Service,
    Targets,
    batching,
    inflate,
    make_job,
    measure,
    one_at_a_time,
    show,
)
from benchmarks.report import PACKAGED_PAIR, table, write

RATIO = 4.0
SATURATING = 5
"""Number of targets that keep the service busy at that ratio, for calibration."""
Job = dict[str, Any]


@contextlib.contextmanager
def running(service: Service) -> Iterator[Service]:
    """Run a service for the duration of the block."""
    try:
        yield service
    finally:
        service.close()


def calibrate(targets: Targets, model: Path, job: Job, rounds: int = 4) -> float:
    """Return the verification time for which Z is RATIO times S while the service is busy."""
    verify = 0.02
    with running(one_at_a_time(model)) as service:
        for _ in range(pick(rounds, 1)):
            calibrated = {**job, "verify": verify, "seconds": pick(3.0, job["seconds"])}
            measured = measure(targets, service, pick(SATURATING, 2), calibrated)
            print(f"calibrating: {verify * 1e3:.2f} ms, Z/S {measured['Z'] / measured['S']:.3f}", flush=True)
            verify += RATIO * measured["S"] - measured["Z"]
    return verify


def knee(measured: list[dict[str, Any]]) -> float:
    """Return the measured N_full: the intersection of the line of rounds that do not wait with the line of a
    busy service."""
    alone, crowded = measured[0], measured[-1]
    return float(alone["round"] / (crowded["round"] / crowded["targets"]))


def n_full(measured: list[dict[str, Any]]) -> float:
    """Return N_full according to the model, unrounded, computed from S and Z while the service is busy."""
    busy = next((one for one in measured if one["targets"] >= SATURATING), measured[-1])
    return float(busy["Z"] / busy["S"] + 1.0)


def keep_warm(targets: Targets, model: Path, job: Job, counts: list[int]) -> list[dict[str, Any]]:
    """Measure keep-warm off, always on, and in the service's automatic mode."""
    measured = []
    for count in counts:
        for mode in ("never", "always", "auto"):
            with running(one_at_a_time(model, "--keep-warm", mode)) as service:
                one = measure(targets, service, count, {**job, "warm": pick(5.0, 0.3)})
                now = service.figures()
                measured.append(
                    {"keep_warm": mode, **one}
                    | {name: now[name] for name in ("cold_seconds", "warm_seconds", "keeping_warm")}
                )
                show(f"keep warm: {mode}", measured[-1])
    return measured


def dead(targets: Targets, model: Path, job: Job) -> list[dict[str, Any]]:
    """Measure targets whose service has died, with plain decoding and with n-grams as the fallback
    drafter."""
    service = one_at_a_time(model)
    service.kill()
    measured = []
    for has_fallback in (False, True):
        for policy in ("goodput", job["policy"]):
            options = {**job, "endpoint": service.address, "fallback": has_fallback, "policy": policy}
            measured.append(
                {"fallback": has_fallback, "policy": policy, "targets": targets.run(pick(4, 2), options)}
            )
    service.close()
    return measured


def memory(model: Path, counts: list[int], budget: int = 1 << 27) -> list[dict[str, int]]:
    """Return the KV tokens that N targets hold in `budget` bytes each: without a draft model, and with one in
    each process, whose weights and KV take memory too. The result is computed, not measured."""
    import torch

    from streamserve.embedded import path
    from streamserve.execution.compute.kv_cache import bytes_per_block
    from streamserve.execution.model.shapes import weight_bytes
    from streamserve.execution.model.spec import read_spec

    target, draft = read_spec(path("embedded")), read_spec(model)
    target_block, draft_block = (bytes_per_block(spec, 16, torch.bfloat16) for spec in (target, draft))
    weights = [weight_bytes(spec, torch.bfloat16, False) for spec in (target, draft)]
    return [
        {
            "targets": count,
            "budget_bytes_each": budget,
            "service_kv_tokens": 16 * count * ((budget - weights[0]) // target_block),
            "own_drafts_kv_tokens": 16 * count * ((budget - sum(weights)) // (target_block + draft_block)),
        }
        for count in counts
    ]


def alone_and_beside(targets: Targets, model: Path, job: Job, counts: list[int]) -> list[dict[str, Any]]:
    """Measure targets without a draft, and with a separate draft in each target's process."""
    measured = []
    for count in counts:
        none = targets.run(count, {**job, "endpoint": "", "policy": "off"})
        target_block = targets.run(count, {**job, "endpoint": "", "draft": str(model)})
        measured.append({"targets": count, "none": none, "own_drafts": target_block})
        sums = [sum(one["tokens_per_second"] for one in part) for part in (none, target_block)]
        print(
            f"N={count}: {sums[0]:.0f} tokens/s without, {sums[1]:.0f} with drafts of their own", flush=True
        )
    return measured


def sweep(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the results; they are written after each part."""
    model = inflate("embedded-draft", folder / "draft", arguments.hidden, arguments.layers)
    job = make_job(model, arguments.seconds, arguments.outputs)
    targets = Targets(max(*arguments.counts, *arguments.batched, pick(SATURATING, 2)))
    try:
        job["verify"] = calibrate(targets, model, job)
        settings = {
            "targets": "paced: verification is slept, acceptance is that of the packaged pair",
            "draft": f"packaged draft inflated to {arguments.hidden} x {arguments.layers}, 1 thread",
            "depth": DEPTH, "verify_seconds": job["verify"], "ratio_wanted": RATIO,
            "seconds": arguments.seconds, "network": "loopback",
        }  # fmt: skip
        figures: dict[str, Any] = {"one_at_a_time": [], "batched": []}
        for name, start, counts in (
            ("one_at_a_time", one_at_a_time, arguments.counts),
            ("batched", batching, arguments.batched),
        ):
            for count in counts:
                with running(start(model)) as service:
                    figures[name].append(measure(targets, service, count, job))
                    show(name, figures[name][-1])
            write(arguments.out, settings, figures, PACKAGED_PAIR)
        figures["N_full_predicted"] = n_full(figures["one_at_a_time"])
        figures["N_full_measured"] = knee(figures["one_at_a_time"])
        figures["without_a_service"] = alone_and_beside(targets, model, job, arguments.colocated)
        write(arguments.out, settings, figures, PACKAGED_PAIR)
        figures["keep_warm"] = keep_warm(targets, model, job, arguments.keep_warm)
        figures["dead"] = dead(targets, model, job)
        figures["memory"] = memory(model, arguments.counts)
        print(write(arguments.out, settings, figures, PACKAGED_PAIR))
    finally:
        targets.close()
    return figures


def print_tables(figures: dict[str, Any]) -> None:
    """Print all measurements, by N."""
    for name in ("one_at_a_time", "batched", "keep_warm"):
        rows = [
            [
                f"{one['targets']} {one.get('keep_warm', '')}",
                f"{one['tokens_per_second']:.0f}",
                f"{min(one['per_target']):.1f}–{max(one['per_target']):.1f}",
                f"{one['rounds_per_second']:.1f}",
                f"{one['t_s'] * 1e3:.2f} ({one['t_s_variance'] * 1e6:.3f})",
                f"{one['Z'] / one['S']:.2f}",
                f"{one['T_wait'] * 1e3:.2f}",
                f"{one['T_idle_per_round'] * 1e3:.2f} / {one['predicted_idle_per_round'] * 1e3:.2f}",
                f"{one['load']:.1%} / {one['predicted_load']:.1%}",
                f"{one['batch']:.2f}",
            ]
            for one in figures[name]
        ]
        columns = (
            "N", "tokens/s", "a target", "rounds/s", "t_s ms (variance)", "Z/S", "T_wait ms",
            "T_idle a round / predicted", "load / predicted", "batch",
        )  # fmt: skip
        table(name.replace("_", " "), columns, rows)
    n_full = figures["N_full_predicted"]
    print(f"N_full measured {figures['N_full_measured']:.2f}, Z/S + 1 = {n_full:.2f}")
    for one in figures["dead"]:
        speeds = [each["tokens_per_second"] for each in one["targets"]]
        print(f"dead service, {one['policy']}, n-grams {one['fallback']}: {sum(speeds):.0f} tokens/s")


def plot(figures: dict[str, Any], path: Path) -> None:
    """Plot throughput and load by N."""
    import matplotlib.pyplot as plt

    figure, (left, middle, accepted) = plt.subplots(1, 3, figsize=(13, 4))
    for name, style in (("one_at_a_time", "o-"), ("batched", "s-")):
        counts = [one["targets"] for one in figures[name]]
        label = name.replace("_", " ")
        left.plot(counts, [one["tokens_per_second"] for one in figures[name]], style, label=label)
        means = [one["tokens_per_second"] / one["targets"] for one in figures[name]]
        middle.plot(counts, means, style, label=label)
        accepted.plot(counts, [one["load"] for one in figures[name]], style, label=f"{label}, measured")
        accepted.plot(
            counts, [one["predicted_load"] for one in figures[name]], "--", label=f"{label}, predicted"
        )
    for name, style in (("none", "k--"), ("own_drafts", "g^-")):
        measured = figures["without_a_service"]
        counts = [one["targets"] for one in measured]
        sums = [sum(each["tokens_per_second"] for each in one[name]) for one in measured]
        label = "no draft" if name == "none" else "a draft of its own each, two cores"
        left.plot(counts, sums, style, label=label)
        middle.plot(
            counts, [value / count for value, count in zip(sums, counts, strict=True)], style, label=label
        )
    for axis, title in ((left, "tokens/s, all targets"), (middle, "tokens/s a target"), (accepted, "load")):
        axis.set(title=title, xlabel="paced targets", ylim=(0, None))
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of each measurement")
    parser.add_argument(
        "--counts",
        type=int,
        nargs="*",
        default=[*range(1, 9), 12, 16],
        help="numbers of targets that are served one at a time",
    )
    parser.add_argument(
        "--batched",
        type=int,
        nargs="*",
        default=[1, 2, 4, 5, 6, 8, 12, 16],
        help="numbers of targets that are served in batches",
    )
    parser.add_argument(
        "--colocated",
        type=int,
        nargs="*",
        default=[1, 2, 4, 5, 8],
        help="numbers of targets without a service",
    )
    parser.add_argument(
        "--keep-warm", type=int, nargs="*", default=[1, 2], help="numbers of targets for keep-warm"
    )
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the inflated draft")
    parser.add_argument("--layers", type=int, default=2, help="layers of the inflated draft")
    parser.add_argument("--outputs", type=int, default=600, help="number of tokens recorded of each text")
    parser.add_argument("--out", default="star", help="name of the results")
    arguments = parse(
        parser, seconds=1.5, counts=[1, 2], batched=[1], colocated=[1], keep_warm=[1], outputs=40
    )
    with tempfile.TemporaryDirectory() as folder:
        figures = sweep(arguments, Path(folder))
    print_tables(figures)
    plot(figures, results_folder() / f"{arguments.out}.png")


if __name__ == "__main__":
    main()
