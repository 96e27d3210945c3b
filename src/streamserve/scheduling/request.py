"""What a scheduling policy may know of a request, as plain data."""

import msgspec

from streamserve.speculation.slo import NO_REQUIREMENT, LatencyRequirement


class RequestView(msgspec.Struct, frozen=True, gc=False):
    """One sequence at the beginning of a step. Times are seconds on the engine's clock. `gc=False`: a step
    makes one for each sequence, and none refers back to another.

    * `remaining`: tokens that this step may compute at most, `computed` ones have KV, of `length` in all.
    * `outputs`: those of them that were generated. `decodes_here`: more will be, on this worker.
    * `cached`: its cached prefix length, as of the last lookup in the prefix index.
    * `prefill_seconds`: estimated seconds to compute what is left of a prompt that is or was a stream.
    * `running`: it holds blocks. `decoding`: it lacks only the KV of its last token, and is to be sampled.
    * `complete`: all of the prompt has arrived, its latest part at `last_chunk_at`. It was complete at
      `completed_at` (None: on arrival). `streamed`: it is, or was, a prompt stream.
    * `edit_stability`: of a prompt stream, the number of its latest edits in a row that retained the token to
      compute next.
    * `deadline`: when its first token is due, until that has been generated.
    * `tpot`: its target for the time per output token in seconds (None: no target; inf: it can no longer meet
      its targets). From the first token on `requirement` holds the target and the progress.
    * `aged_in`: it is admitted whatever the effect on other requests' targets.

    Of a sequence with nothing to compute only arrival, priority, computed tokens, times and `tpot` are known;
    `idle` is a prompt stream that takes no memory from others: it waits for more of its prompt, or computes
    again what was evicted meanwhile.
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
        """When the prompt was complete; on arrival, if it is not complete yet."""
        completed_at = self.completed_at
        return self.arrival if completed_at is None or not self.complete else completed_at
