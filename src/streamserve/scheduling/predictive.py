"""Predictive routing: by the completion time that step costs predict."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from streamserve.contracts.cost import WorkerCosts
from streamserve.scheduling.flowguard import (
    FlowGuard,
)
from streamserve.scheduling.routing import Arrival, Decision, RouteCandidate, Router, best, or_inf


@dataclass(frozen=True)
class Predictive:
    """Predictive routing: the candidate where the request misses the fewest targets, among equal ones the
    candidate where it finishes first.

    * TTFT: the time to prefill the queued prompts that can still be in time (workers defer late ones) and
      then the uncached tokens of this prompt. The part of the queued prompts that is already computed is
      subtracted.
    * TPOT: the time of a decode step with this request and all sequences that decode on the worker or soon
      will, divided by the worker's present speedup by speculation.
    * A candidate whose free KV is too small for the request, or whose sequence slots are taken, counts as
      missing one more target.
    * Each candidate is predicted by the step costs of its own workers. If a step cost is unknown, `fallback`
      chooses.

    `output` is the expected number of output tokens. Candidates that have been silent for more than `stale`
    seconds are only chosen if all have.
    """

    output: int = 128
    stale: float = 1.5
    fallback: Router = field(default_factory=FlowGuard)

    def __call__(self, arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
        # Runs for every candidate of every request: written for speed.
        ttft_target, tpot_target = or_inf(arrival.ttft), or_inf(arrival.tpot)
        output, stale = self.output, self.stale
        total_tokens = arrival.prompt_tokens + output
        keys = []
        for candidate in candidates:
            prefill, decode = candidate.prefill, candidate.decode
            if prefill.costs is None or decode.costs is None:
                decision = self.fallback(arrival, candidates, turn)
                return replace(decision, reason=f"a step cost is unknown: {decision.reason}")
            ttft, tpot = self.predict(arrival, candidate, prefill.costs, decode.costs)
            full = total_tokens > (decode.blocks_total - decode.blocks_live) * decode.costs.block_size
            full = full or decode.decoding + decode.incoming >= decode.max_num_seqs
            fresh = prefill.silence <= stale and decode.silence <= stale
            keys.append(
                (fresh, -((ttft > ttft_target) + (tpot > tpot_target) + full), -(ttft + tpot * output))
            )
        chosen = best(keys, turn)
        scores = tuple([score if fresh or not keys[chosen][0] else None for fresh, _, score in keys])
        return Decision(chosen, scores, "fewest missed targets, then earliest completion")

    def predict(
        self,
        arrival: Arrival,
        candidate: RouteCandidate,
        prefill_costs: WorkerCosts,
        decode_costs: WorkerCosts,
    ) -> tuple[float, float]:
        """Return the predicted seconds to the first token, and the seconds for each further token."""
        prefill, decode = candidate.prefill, candidate.decode
        uncached_tokens, ahead = max(arrival.prompt_tokens - candidate.cached, 1), prefill.timely_tokens
        # Rounded up to whole blocks: fewer different costs are computed.
        blocks = (uncached_tokens - 1) // prefill_costs.block_size + 1
        waiting = (
            min(max(prefill_costs.prefill(ahead) - prefill.busy, 0.0), prefill.timely_for) if ahead else 0.0
        )
        ttft = waiting + prefill_costs.prefill(blocks * prefill_costs.block_size)
        sequences = decode.decoding + decode.incoming + 1
        step = decode_costs.decode(sequences, decode.blocks_live * decode_costs.block_size)
        step += arrival.prompt_tokens * decode_costs.token
        if prefill is decode:  # prefilling delays the decoding sequences of a unified worker
            step += prefill_costs.prefill(prefill.queued_tokens) / self.output
        return ttft, step / decode.speedup
