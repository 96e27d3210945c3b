"""Models on a GPU."""

from benchmarks.figures.files import figures

from .base import Row, table


@table("gpu/decoding", "gpu-8b", "gpu-8b-int4")
def decoding() -> tuple[Row, list[Row]]:
    """Return decoding steps and their hardware floors."""
    rows = [
        [
            weights,
            f"{one['batch']:.0f}",
            f"{one['step ms']:.2f}",
            f"{one['floor ms']:.2f}",
            f"{one['share of floor'] * 100:.0f} %",
            f"{max(one['gap'], 0) * 100:.1f} %",
            f"{one['tokens/s']:.0f}",
        ]
        for weights, file in (("bf16", "gpu-8b"), ("int4", "gpu-8b-int4"))
        for one in figures(file)["decoding"]
    ]
    head = ["8B", "sequences", "step, ms", "floor, ms", "share of the floor", "device idle", "tokens/s"]
    return head, rows


@table("gpu/prefill", "gpu-8b", brief=True)
def prefill() -> tuple[Row, list[Row]]:
    """Return how close prefill comes to the rate of a matrix product."""
    one = figures("gpu-8b")["prefill"]
    share = f"{one['share of the matrix rate'] * 100:.0f} %"
    row = ["bf16", f"{one['prompt']:.0f}", f"{one['tokens/s']:.0f}", share]
    return ["8B", "prompt", "tokens/s", "share of the matrix rate"], [row]


@table("gpu/speculation", "gpu-8b", brief=True)
def speculation() -> tuple[Row, list[Row]]:
    """Return the speed with speculation and of plain decoding, for an inflated pair."""
    rows = [
        [
            one["policy"],
            f"{one['streams']}",
            f"{one['plain tokens/s']:.0f}",
            f"{one['tokens/s']:.0f}",
            f"{one['speedup']:.2f}",
            f"{one['accepted'] * 100:.0f} %",
        ]
        for one in figures("gpu-8b")["speculation"]
    ]
    head = ["policy", "streams", "plain, tokens/s", "tokens/s", "factor", "of the tokens drafted"]
    return head, rows
