"""The draft service: paced targets, hosts, and targets on shared cores."""

from benchmarks.figures.files import figures
from benchmarks.figures.lookup import call

from .base import Row, table


def _idle(one: dict[str, float]) -> str:
    """Return the measured and the predicted idle time of a round; 0 where the model predicts no idle time."""
    predicted = one["predicted_idle_per_round"] * 1e3
    shown = "0" if predicted < 0.05 else f"{predicted:.1f}"
    return f"{one['T_idle_per_round'] * 1e3:.1f} / {shown}"


def _load(one: dict[str, float]) -> str:
    return f"{one['load'] * 100:.0f} % / {one['predicted_load'] * 100:.0f} %"


@table("draft/paced", "star")
def paced() -> tuple[Row, list[Row]]:
    """Return tokens a second, waiting and load by number of targets."""
    head = [
        "N", "tokens/s", "slowest target", "Z/S", "T_wait ms", "T_idle a round, measured / predicted, ms",
        "load, measured / predicted",
    ]  # fmt: skip
    rows = [
        [
            str(one["targets"]),
            f"{one['tokens_per_second']:.0f}",
            f"{min(one['per_target']):.0f}",
            f"{one['Z'] / one['S']:.1f}",
            f"{one['T_wait'] * 1e3:.1f}",
            _idle(one),
            _load(one),
        ]
        for one in figures("star")["one_at_a_time"]
    ]
    return head, rows


@table("draft/hosts", "star_hosts")
def hosts() -> tuple[Row, list[Row]]:
    """Return the results with one and with five targets by the link's delay."""
    by = {(one["delay_each_way"], one["targets"]): one for one in figures("star_hosts")}
    rows = [
        [
            f"{delay * 1e3:.0f} ms",
            *(f"{by[delay, targets]['tokens_per_second']:.0f}" for targets in (1, 5)),
            _idle(by[delay, 5]),
            _load(by[delay, 5]),
        ]
        for delay in sorted({delay for delay, _ in by})
    ]
    head = [
        "delay each way", "tokens/s, N = 1", "N = 5", "T_idle a round of 5, measured / predicted, ms",
        "load, measured / predicted",
    ]  # fmt: skip
    return head, rows


@table("draft/live", "star_live")
def live() -> tuple[Row, list[Row]]:
    """Return the results of real targets that share two cores with the service."""
    rows = []
    for one in figures("star_live"):
        before, service, own, after = (
            sum(one[key]["per_target"]) for key in ("none", "service", "own", "none_again")
        )
        rows.append(
            [
                str(one["targets"]),
                f"{before:.0f}, {after:.0f}",
                f"{service:.0f}",
                f"{own:.0f}",
                f"{service / own:.2f}",
            ]
        )
    return [
        "N",
        "no draft, tokens/s (before, after)",
        "service",
        "draft in each target",
        "service / own draft",
    ], rows


@call("draft.live.gain")
def _gain() -> list[float]:
    return [gain for one in figures("star_live") for gain in one["gain_of_each"]]


def _own(targets: int) -> list[float]:
    (found,) = [one for one in figures("star")["without_a_service"] if one["targets"] == targets]
    return [one["tokens_per_second"] for one in found["own_drafts"]]


call("draft.own.1")(lambda: sum(_own(1)))
call("draft.own.4")(lambda: sum(_own(4)))
call("draft.own.4.each")(lambda: _own(4))


def _paced(targets: int, part: str = "one_at_a_time") -> dict[str, float]:
    found: dict[str, float] = next(one for one in figures("star")[part] if one["targets"] == targets)
    return found


call("draft.service_over_own.1")(lambda: 1 - _paced(1)["tokens_per_second"] / sum(_own(1)))
call("draft.service_over_own.4")(lambda: _paced(4)["tokens_per_second"] / sum(_own(4)) - 1)
for _count in (8, 16):
    call(f"draft.batched.gain.{_count}")(
        lambda count=_count: (
            _paced(count, "batched")["tokens_per_second"] / _paced(count)["tokens_per_second"]
        )
    )


@call("draft.ngrams")
def _ngrams() -> list[float]:
    """Return tokens a second of targets whose service does not answer and that use n-grams as the
    fallback."""
    (found,) = [one for one in figures("star")["dead"] if one["fallback"] and one["policy"] == "goodput"]
    return [one["tokens_per_second"] for one in found["targets"]]
