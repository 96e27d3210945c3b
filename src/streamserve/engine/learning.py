"""What an engine learns from its steps: costs, acceptance and running averages.

A step's results are committed first, and it is learned from later: while a device computes the next step.
"""

from dataclasses import dataclass

from streamserve.contracts.plan import StepResult
from streamserve.engine.ahead import Flight
from streamserve.engine.batch import RunningAverages
from streamserve.speculation.controller import MeasuredStep


@dataclass
class StepLearning:
    """The last step, until it has been learned from."""

    averages: RunningAverages
    _last: tuple[Flight, StepResult, float, float | None] | None = None

    def add(self, flight: Flight, result: StepResult, spent: float, interval: float | None) -> None:
        """Record a step with its results, its seconds, and the seconds since the end of the step before it
        (StepPipeline.interval)."""
        self._last = flight, result, spent, interval

    def learn(self) -> None:
        """Learn from the last step, unless that has been done."""
        if self._last is None:
            return
        (flight, result, spent, interval), self._last = self._last, None
        spans, query_tokens = flight.plan.spans, flight.query_tokens
        decoding = [outcome for outcome in result.spans if outcome.outputs]
        if flight.ahead:  # each result is one token
            new_tokens = tokens = len(decoding)
            prompts = len(spans) - tokens
        else:
            new_tokens = sum(len(outputs) for outcome in decoding for outputs in outcome.outputs)
            prompts = sum(len(span.tokens) for span in spans) - len(decoding)
            tokens = sum(len(outcome.outputs[0]) for outcome in decoding)
        draft_tokens = query_tokens - prompts - len(decoding)
        self.averages.stepped(len(decoding), tokens, prompts, draft_tokens, flight.round.drafting_seconds)
        verified = [
            (
                span.sequence,
                flight.round.known(span.sequence, span.tree),
                [sampled.token for sampled in outcome.outputs[0]],
            )
            for span, outcome in (zip(spans, result.spans, strict=True) if flight.round.drafted else ())
            if span.sequence in flight.round.drafted and span.tree and outcome.outputs and not outcome.error
        ]
        flight.round.learn(
            MeasuredStep(
                query_tokens, flight.kv_tokens, spent, new_tokens, verified,
                interval, len(spans), flight.ahead > 0,
            )
        )  # fmt: skip
