"""StreamServe's table 9 in virtual time: a closed loop of streams, the machine's costs, recorded drafts.

Complements the live measurement on two noisy cores: the same requests for every setting, without timing
noise.

    python -m benchmarks.papers.specustream_virtual
"""

import argparse
import itertools
from typing import Any

from benchmarks.options import parse, pick
from benchmarks.papers.slo import model, recorded
from benchmarks.papers.slo_costs import Hardware, here
from benchmarks.papers.specustream import SETTINGS
from benchmarks.recorded import RecordedDrafter, Recording
from benchmarks.report import SIMULATED, table, write
from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.engine_config import EngineConfig
from streamserve.engine.engine import Engine
from streamserve.protocol.messages import Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.executor import CostExecutor
from streamserve.speculation.controller import Speculation

MAX_TOKENS = 64
PROMPT = [3, 5, 1]
"""Tokens of a prompt. Prompts are in the cache in the live benchmark, so they are short here."""
CONFIG = EngineConfig(
    num_blocks=4096, max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=512, max_chunk=64,
    enable_prefix_caching=False,
)  # fmt: skip


class Loop:
    """An engine whose clock advances by the costs of its steps."""

    def __init__(self, hardware: Hardware, recording: Recording, setting: str) -> None:
        self.executor = CostExecutor(CONFIG.num_blocks, CONFIG.block_size, 4096, hardware.step)
        self.before = 0.0
        drafter = RecordedDrafter(recording, self.executor, hardware.draft)
        self.engine = Engine(
            CONFIG, model(), self.executor, lambda: self.before + self.executor.seconds,
            None if setting == "off" else drafter,
            Speculation(parse_policy(setting), hardware.step, lambda tokens: hardware.draft(round(tokens))),
        )  # fmt: skip

    def step(self) -> list[Token]:
        self.executor.seconds = 0.0
        tokens = [event for event in self.engine.step() if isinstance(event, Token)]
        self.before += self.executor.seconds
        return tokens


def rate(loop: Loop, texts: list[int], streams: int, tokens: int) -> float:
    """Return tokens a second of a closed loop, without the first quarter of the `tokens`."""
    numbers, going, received = itertools.count(), set[str](), 0
    begun: tuple[float, int] | None = None
    while received < tokens:
        while len(going) < streams:
            number = next(numbers)
            params = SamplingParams(temperature=0.0, seed=texts[number % len(texts)], max_tokens=MAX_TOKENS)
            loop.engine.handle(
                Submit(
                    str(number),
                    [number * 7 % 4000, *PROMPT],
                    params,
                    outputs={0: []},
                    arrival=float(number),
                )
            )
            going.add(str(number))
        for token in loop.step():
            received += 1
            if token.finish:
                going.discard(token.request)
        if begun is None and received >= tokens / 4:
            begun = loop.before, received
    assert begun is not None
    return (received - begun[1]) / (loop.before - begun[0])


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=["functions", "articles"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4, 8, 16, 32])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    args = parse(parser, families=["functions"], streams=[1])
    hardware, recording = here(), recorded()
    records: list[dict[str, Any]] = []
    for streams in args.streams:
        for family in args.families:
            texts = [i for i, name in enumerate(recording.families) if name == family]
            measured = {
                name: rate(
                    Loop(hardware, recording, name), texts, streams, pick(3 * MAX_TOKENS * streams + 4000, 40)
                )
                for name in args.settings
            }
            records.append({"family": family, "streams": streams, "tokens_per_second": measured})
    rows = [
        [f"{r['family']}, {r['streams']}", *(f"{r['tokens_per_second'][name]:.0f}" for name in args.settings)]
        for r in records
    ]
    table(f"tokens a second; B = {hardware.budget}", ["family, streams", *args.settings], rows)
    write(
        "specustream_virtual",
        {**vars(args), "B": hardware.budget, "costs": hardware.note},
        records,
        SIMULATED,
    )


if __name__ == "__main__":
    main()
