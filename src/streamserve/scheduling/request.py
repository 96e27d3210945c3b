"""A request as scheduling policies see it, as plain data."""

import msgspec

from streamserve.speculation.slo import NO_REQUIREMENT, LatencyRequirement


class RequestView(msgspec.Struct, frozen=True, gc=False):
    """One sequence at the beginning of a step. Times are seconds on the engine's clock.

    * `remaining`: number of tokens left to compute, the upper limit of its tokens in this step. `computed`:
      tokens with KV. `length`: all tokens, of which the last `outputs` were generated.
    * `decodes_here`: this worker generates its output tokens.
    * `cached`: its cached prefix length, as of the last lookup in the prefix index.
    * `prefill_seconds`: estimated seconds to compute the rest of a prompt that is or was a stream; otherwise
      0.
    * `running`: it holds blocks. `decoding`: it lacks only the KV of its last token, and is to be sampled.
    * `complete`: all of the prompt has arrived, its latest part at `last_chunk_at`. It was complete at
      `completed_at` (None: on arrival). `streamed`: it is, or was, a prompt stream.
    * `edit_stability`: how many of a prompt stream's latest edits, without a gap, retained the token that is
      to be computed next.
    * `deadline`: when its first token is due; None once that is generated, or without a target.
    * `tpot`: its target for the time per output token in seconds (None: no target; inf: it can no longer meet
      its targets). From the first token on, `requirement` holds the target and the progress.
    * `aged_in`: it is admitted whatever the effect on other requests' targets.
    * `idle`: it is a prompt stream that takes no memory from other sequences: it waits for more of its
      prompt, or computes evicted KV again.

    For a sequence with nothing to compute, only arrival, priority, computed tokens, times, `tpot` and `idle`
    are set. `gc=False` because a step makes a view for each sequence, and views never refer to each other.
    """

    arrival: float
    priority: int = 0
    remaining: int = 0
    computed: int = 0
    length: int = 0
    outputs: int = 0
    decodes_here: bool = True
    cached: int = 0
    prefill_seconds: float = 0.0
    running: bool = False
    decoding: bool = False
    complete: bool = True
    last_chunk_at: float = 0.0
    completed_at: float | None = None
    streamed: bool = False
    edit_stability: int = 0
    deadline: float | None = None
    tpot: float | None = None
    requirement: LatencyRequirement = NO_REQUIREMENT
    idle: bool = False
    aged_in: bool = False

    @property
    def complete_since(self) -> float:
        """When the prompt was complete; its arrival if it is not complete yet."""
        completed_at = self.completed_at
        return self.arrival if completed_at is None or not self.complete else completed_at
