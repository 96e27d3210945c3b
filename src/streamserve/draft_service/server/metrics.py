"""A draft service's reports as Prometheus metrics."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamserve.protocol.drafting import DraftReport

PREFIX = "streamserve_draft:"
GAUGES = {
    "at": "Seconds on the service's clock when this was reported.",
    "targets": "Sessions that are open.",
    "active": "Targets that are being drafted for (N).",
    "waiting": "Requests in the in-queue.",
    "blocks_total": "KV blocks.",
    "blocks_used": "KV blocks that sequences hold.",
    "mean_pass_seconds": "Seconds of a draft pass (t_s), lately.",
    "turn_seconds": "Seconds of drafting for a batch (S).",
    "depth": "Depth of trees (d).",
    "batch": "Targets in a batch (b).",
    "back_seconds": "Seconds from an answer to the target's next request (Z).",
    "verify_seconds": "The target's own part of that (t_v).",
    "communication_seconds": "The rest of it (t_c).",
    "plain_seconds": "Seconds of a target's step without guesses.",
    "beta": "Chance that a guess is accepted if those before it were.",
    "full": "Targets that keep the service busy (N_full), by the model.",
    "most": "Most targets that all gain (N_max), by the model.",
    "predicted_round_seconds": "Seconds of a target's round, by the model; compare with round_seconds.",
    "predicted_idle_seconds": "Idle seconds of a round, by the model; compare with idle_seconds.",
    "cold_seconds": "Seconds by level of a tree of waiting and drafting after a gap, not kept warm.",
    "warm_seconds": "The same where gaps were bridged by passes for nobody.",
    "keeping_warm": "Whether gaps are being bridged (1) or not (0).",
    "predicted_load": "Share of the time spent drafting, by the model; compare with busy_seconds.",
}
COUNTERS = {
    "batches": "Batches drafted.",
    "requests": "Requests of targets that were in them.",
    "trees": "Trees sent.",
    "busy": "Seconds spent drafting.",
    "idle": "Seconds in which nothing waited.",
    "waited": "Seconds that requests waited.",
    "guesses": "Guesses that targets tested.",
    "accepted": "Guesses that were right.",
    "rebuilt": "Sequences whose KV was computed again after an eviction.",
    "passes": "Draft passes.",
    "pass_seconds": "Seconds that those took.",
    "pass_squares": "Sum of the squares of each one's seconds.",
    "warm_passes": "Draft passes for nobody.",
    "returns": "Requests that followed an answer to the same target.",
    "away_seconds": "Seconds between those.",
    "rounds": "Answers that followed another to the same target.",
    "round_seconds": "Seconds between those.",
}
SECONDS = ("busy", "idle", "waited")


class DraftCollector(Collector):
    """Exports the latest `report`, and the number of worker restarts."""

    report: DraftReport | None = None
    restarts = 0

    def collect(self) -> Iterator[Metric]:
        report = self.report
        if report is None:
            return
        yield CounterMetricFamily(PREFIX + "restarts", "Workers started as one died.", value=self.restarts)
        for name, text in GAUGES.items():
            field = name.removeprefix("mean_")  # a sum of the same name exists
            yield GaugeMetricFamily(PREFIX + name, text, value=getattr(report, field))
        for name, text in COUNTERS.items():
            shown = f"{name}_seconds" if name in SECONDS else name
            yield CounterMetricFamily(PREFIX + shown, text, value=getattr(report.sums, name))
        yield CounterMetricFamily(
            PREFIX + "evictions", "Sequences that lost their KV to others.", value=report.evictions
        )
        refused = CounterMetricFamily(PREFIX + "refused", "Messages that were refused.", labels=["reason"])
        for reason, count in report.sums.refused.items():
            refused.add_metric([reason], count)
        yield refused
