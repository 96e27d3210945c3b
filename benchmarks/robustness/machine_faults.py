"""Every fault of a machine at every lifecycle event, several times. Measures the time until all answers are
complete and the pair is ready again. See tests/extras/cluster/machine_faults.py; needs root.

    python -m benchmarks.robustness.machine_faults --rounds 5
    python -m benchmarks.robustness.machine_faults --rounds 5 --launched ray     kills Ray nodes

Trials that are in the result file are not repeated: an interruption loses at most one trial.
"""

import argparse
import json
import time
from math import inf
from typing import Any, get_args

from benchmarks.options import parse, pick, results_folder
from benchmarks.report import SIMULATED, commit, table, write
from tests.campaigns.drive import attempt
from tests.campaigns.machine_faults import CASES, case, open_campaign, ray_case
from tests.extras.cluster.machine_faults import (
    EVENTS,
    FAULT_SECONDS,
    FAULTS,
    LEASE,
    RAY_FAULTS,
    STREAMS,
    Launched,
)

NAME = "machine_faults"


def known() -> list[dict[str, Any]]:
    """Return the trials of the result file."""
    path = results_folder() / f"{NAME}.json"
    return json.loads(path.read_text())["figures"]["trials"] if path.exists() else []


def save(trials: list[dict[str, Any]]) -> None:
    """Write the trials that were run so far."""
    settings = {
        "lease": LEASE, "streams": STREAMS, "events": len(EVENTS), "link_disturbed_seconds": FAULT_SECONDS,
        "network": "network namespaces, veth, a wire of TAP devices", "model": "a small random one, 1 thread",
    }  # fmt: skip
    write(NAME, settings, {"trials": trials}, SIMULATED)


def run(launched: Launched, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Run the missing trials for at most `seconds`; return all trials."""
    trials, end = known(), time.monotonic() + seconds
    faults, cases = (RAY_FAULTS, len(EVENTS)) if launched == "ray" else (FAULTS, CASES)
    cases = pick(cases, 1)
    done = {trial["seed"] for trial in trials if trial["fault"] in faults}
    with open_campaign(launched) as campaign:
        for seed in (seed for seed in range(rounds * cases) if seed not in done):
            event, fault, worker = ray_case(seed) if launched == "ray" else case(seed)
            outcome = attempt(campaign, seed)
            trials.append({
                "seed": seed, "event": event, "fault": fault, "worker": worker, "commit": commit(),
                "verdict": outcome.verdict, "detail": outcome.detail[-300:],
                "seconds": outcome.worst.get(fault),
            })  # fmt: skip
            print(seed, event, fault, worker, outcome.verdict, outcome.worst.get(fault), flush=True)
            save(trials)
            if time.monotonic() > end:
                break
    return trials


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of every event with every fault")
    parser.add_argument("--launched", choices=get_args(Launched), default="join")
    parser.add_argument("--minutes", type=float, default=inf, help="maximum duration of this run")
    args = parse(parser, rounds=1)
    trials = run(args.launched, args.rounds, 60 * args.minutes)
    rows = []
    for fault in FAULTS | RAY_FAULTS:
        seconds = sorted(t["seconds"] for t in trials if t["fault"] == fault and t["verdict"] == "passed")
        failed = sum(t["fault"] == fault and t["verdict"] == "failed" for t in trials)
        spread = [f"{seconds[len(seconds) // 2]:.1f}", f"{seconds[-1]:.1f}"] if seconds else ["", ""]
        rows.append([fault, str(len(seconds) + failed), str(failed), *spread])
    table("Faults of machines", ["fault", "trials", "failed", "median s", "longest s"], rows)


if __name__ == "__main__":
    main()
