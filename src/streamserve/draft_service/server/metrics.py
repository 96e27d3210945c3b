"""A draft service's reports as Prometheus metrics."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamserve.protocol.drafting import DraftReport

PREFIX = "streamserve_draft:"
GAUGES = {
    "at": "Time of this report on the service's clock, in seconds.",
    "targets": "Open sessions.",
    "active": "Targets that are being drafted for (N).",
    "waiting": "Requests waiting for a batch.",
    "blocks_total": "KV blocks in the pool.",
    "blocks_used": "KV blocks in use by sequences.",
    "mean_pass_seconds": "Recent mean seconds of a draft pass (t_s).",
    "batch_seconds": "Recent mean seconds of drafting for a batch (S).",
    "depth": "Recent mean depth of draft trees (d).",
    "batch": "Recent mean number of targets in a batch (b).",
    "return_seconds": "Recent mean seconds from an answer to the target's next request (Z).",
    "verify_seconds": "The part of return_seconds in which the target verifies (t_v).",
    "communication_seconds": "The part of return_seconds that is spent on communication (t_c).",
    "plain_seconds": "Seconds of a target's step without draft tokens.",
    "beta": (
        "Probability that a draft token is accepted if all draft tokens before it were accepted (beta)."
    ),
    "n_full": "Predicted number of targets that keep the service busy (N_full).",
    "n_max": "Predicted maximum number of targets that the service can speed up at the same time (N_max).",
    "predicted_round_seconds": "Predicted seconds of a target's round; compare with round_seconds.",
    "predicted_idle_seconds": "Predicted idle seconds of a round; compare with idle_seconds.",
    "cold_seconds": "Seconds of waiting and drafting per tree level after an idle gap, without dummy passes.",
    "warm_seconds": "Seconds of waiting and drafting per tree level after an idle gap, with dummy passes.",
    "keeping_warm": "Whether dummy passes keep the model warm (1) or not (0).",
    "predicted_load": "Predicted share of time spent drafting; compare with the rate of busy_seconds.",
}
COUNTERS = {
    "batches": "Drafted batches.",
    "requests": "Requests in drafted batches.",
    "trees": "Draft trees sent to targets.",
    "busy": "Seconds spent drafting.",
    "idle": "Seconds without queued requests.",
    "waited": "Seconds that requests waited for their batch.",
    "draft_tokens": "Draft tokens that targets tested.",
    "accepted": "Draft tokens that targets accepted.",
    "rebuilt": "Sequences whose KV was recomputed after an eviction.",
    "passes": "Draft passes run.",
    "pass_seconds": "Seconds spent in draft passes.",
    "pass_squares": "Sum of the squares of the seconds of each draft pass.",
    "warm_passes": "Dummy passes run to keep the model warm.",
    "returns": "Requests that followed an answer to the same target.",
    "away_seconds": "Seconds between an answer and the next request of the same target.",
    "rounds": "Answers that followed an earlier answer to the same target.",
    "round_seconds": "Seconds between two answers to the same target.",
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
        yield CounterMetricFamily(
            PREFIX + "restarts", "Restarts of the worker after it died.", value=self.restarts
        )
        for name, text in GAUGES.items():
            field = name.removeprefix("mean_")  # the counter has the name without `mean_`
            yield GaugeMetricFamily(PREFIX + name, text, value=getattr(report, field))
        for name, text in COUNTERS.items():
            shown = f"{name}_seconds" if name in SECONDS else name
            yield CounterMetricFamily(PREFIX + shown, text, value=getattr(report.sums, name))
        yield CounterMetricFamily(
            PREFIX + "evictions", "Sequences whose KV was evicted.", value=report.evictions
        )
        refused = CounterMetricFamily(PREFIX + "refused", "Messages that were refused.", labels=["reason"])
        for reason, count in report.sums.refused.items():
            refused.add_metric([reason], count)
        yield refused
