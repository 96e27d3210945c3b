"""Step costs for simulated latency targets: measured here, and rooflines of other machines.

python -m benchmarks.papers.slo_costs      # measures the pair here, for a minute
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.options import cache, parse, pick
from benchmarks.report import commit, machine
from benchmarks.speculation.speculation import SHAPE
from streamserve import embedded
from streamserve.baselines.adaserve import token_budget
from streamserve.execution.formats.inflate import ModelShape, inflate
from streamserve.execution.loading.load import load
from streamserve.execution.profile.measure import Effort, measure
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.cost_curve import CostCurve

PATH = Path(__file__).parents[1] / "data" / "costs.json"
EFFORT = Effort((1, 2, 4, 8, 16, 32, 64, 128), (0, 2048), 32, (256,), 3, 60.0)


@dataclass(frozen=True)
class Hardware:
    """A machine's costs: `step(tokens, kv_tokens)` and `draft(tokens)` in seconds; `note` says where they
    come from."""

    name: str
    step: Callable[[int, int], float]
    draft: Callable[[int], float]
    note: str

    @property
    def budget(self) -> int:
        """The token budget B of a step."""
        return token_budget(lambda rows: self.step(rows, 0))


class Kept(msgspec.Struct):
    """A cost curve as the file stores it."""

    cost: CostCurve
    kv_token_bytes: int


def here(path: Path = PATH) -> Hardware:
    """Return the pair as measured on the machine that the file at `path` names."""
    read = json.loads(path.read_text(encoding="utf-8"))
    target, draft = (msgspec.convert(read[name], Kept) for name in ("target", "draft"))
    cores = read["machine"]
    return Hardware(
        "here",
        target.cost.in_tokens(target.kv_token_bytes),
        lambda rows: draft.cost(rows),
        f"measured: {cores['processor']}, {cores['cores']} cores, 345 M parameters in {read['dtype']}, "
        "packaged draft",
    )


def roofline(name: str, budget: int, weights: float, bandwidth: float, kv_token: float) -> Hardware:
    """Return a machine whose steps take the longer of reading weights and KV and of multiplying; `weights`
    and `kv_token` in bytes, `bandwidth` in bytes a second. The draft has a hundredth of the weights."""
    first = weights / bandwidth

    def step(rows: int, kv_tokens: int) -> float:
        return max(first + kv_tokens * kv_token / bandwidth, rows * first / budget)

    return Hardware(
        name, step, lambda rows: step(rows, 0) / 100, f"simulated roofline, B = {budget}, not measured"
    )


def a100() -> Hardware:
    """Return Llama-2-70B in half precision on four A100: 2.0 TB/s each, B = 156 (AdaServe, table 1)."""
    return roofline("A100-like", 156, 140e9, 4 * 2.0e12, 328e3)


def h200() -> Hardware:
    """Return Llama-2-70B in half precision on four H200: 4.8 TB/s and 989 TFLOP/s each, B = 989e12 / 4.8e12 =
    206."""
    return roofline("H200-like", 206, 140e9, 4 * 4.8e12, 328e3)


def main() -> None:
    """Measure the pair and store the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse(parser)
    effort, path = pick(EFFORT, Effort((1, 8), (0,), 8, (256,), 1, 0.0)), cache(PATH)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "target"
        inflate(embedded.path("embedded"), folder, pick(SHAPE, ModelShape(256, 8)))
        draft = embedded.path("embedded").parent / "draft"
        models = [
            (name, load(ModelConfig(path=str(path), draft="none", num_blocks=1024, max_model_len=2048)))
            for name, path in (("target", folder), ("draft", draft))
        ]
        profiles = dict(zip(("target", "draft"), measure(models, effort), strict=True))
    cached = {
        name: msgspec.to_builtins(Kept(profile.cost, profile.kv_token_bytes))
        for name, profile in profiles.items()
    }
    dtype = profiles["target"].subject.dtype
    path.write_text(
        json.dumps({"machine": machine(), "commit": commit(), "dtype": dtype, **cached}, indent=1) + "\n"
    )
    measured = here(path)
    steps = ", ".join(f"{rows}: {1e3 * measured.step(rows, 0):.0f}" for rows in effort.query_tokens)
    drafts = ", ".join(f"{rows}: {1e3 * measured.draft(rows):.1f}" for rows in effort.query_tokens)
    print(f"{measured.note}; B = {measured.budget}\nms by query tokens: {steps}\nof the draft: {drafts}")


if __name__ == "__main__":
    main()
