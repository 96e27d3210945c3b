"""A worker's reports, sent twice a second: its state, and counters since its start.

Each field declares how its values of several workers are merged (fleet/report_totals.py).
"""

from enum import Enum, auto
from typing import Annotated

import msgspec


class Merge(Enum):
    """How a field of several workers' reports becomes a field of their total. When a worker ends, its
    counters stay in the total, and its state does not."""

    COUNTER = auto()
    """The sum."""
    COMPLETE_COUNTER = auto()
    """The sum if all workers have it, else None: it is compared with counters that all workers have."""
    COUNTERS_BY_INDEX = auto()
    """The sum of each entry of a list; an absent entry is 0."""
    COUNTERS_BY_KEY = auto()
    """The sum of each entry of a dictionary; an absent entry is 0."""
    STATE = auto()
    """The sum of the present values of all workers."""
    LONGEST_STATE = auto()
    """The maximum: times that pass at all workers together are not added."""
    FIELDS = auto()
    """A report within the report, or None: it is merged field by field, over the workers that have it."""


Count = Annotated[int, Merge.COUNTER]
Seconds = Annotated[float, Merge.COUNTER]
Counts = Annotated[list[int], Merge.COUNTERS_BY_INDEX]
CountsByKey = Annotated[dict[str, int], Merge.COUNTERS_BY_KEY]
Present = Annotated[int, Merge.STATE]


class SpeculationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of speculation so far, for a worker that has a drafter.

    - `drafts`, `drafted`: draft trees, and draft tokens in them; `verified`: draft tokens verified.
    - `accepted`: draft tokens that became outputs, so none after an end-of-text or stop token.
      `accepted_at[i]`: the accepted draft tokens of depth i + 1.
    - `expected`: accepted draft tokens as predicted before verification.
    - `trees_by_nodes[i]`, `trees_by_depth[i]`: verified trees with i + 1 draft tokens, and with i + 1 levels
      of them.
    """

    drafts: Count
    drafted: Count
    verified: Count
    accepted: Count
    expected: Annotated[float, Merge.COUNTER]
    accepted_at: Counts
    trees_by_nodes: Counts
    trees_by_depth: Counts
    draft_seconds: Seconds
    select_seconds: Seconds


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histogram of tokens per step, equal to vLLM's."""


class StepTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Steps by their tokens: prompt tokens computed and tokens generated. `counts[i]`: steps with at most
    `STEP_TOKENS[i]` tokens and more than the bound before; the last count has all larger steps. `total`: the
    sum of all tokens."""

    counts: Counts
    total: Count


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of all steps by part: `scheduling` (step composition and selection of draft tokens),
    `draft` (drafting) and `target` (the executor). The rest of a step processes results: it updates
    statistics and creates events."""

    scheduling: Seconds
    draft: Seconds
    target: Seconds


class EvictionReport(msgspec.Struct, kw_only=True):
    """The KV of evicted sequences so far; the engine counts in it. Predicted seconds are for the chosen way
    (swap or recompute), at the time of the choice. `swap_seconds` were spent on copies. `recompute_seconds`
    were spent on recomputing dropped KV: a share of each step, by query tokens."""

    swaps: Count = 0
    recomputes: Count = 0
    blocks_out: Count = 0
    blocks_back: Count = 0
    swap_predicted: Seconds = 0.0
    swap_seconds: Seconds = 0.0
    recompute_predicted: Seconds = 0.0
    recompute_seconds: Seconds = 0.0


class StreamReport(msgspec.Struct, kw_only=True):
    """Prompt streams so far; the engine counts in it.

    - `chunks`: edits that changed a prompt; `invalidated`: tokens whose KV an edit dropped.
    - `finished`: finished prompts, `tokens`: their tokens, `computed_before`: tokens that had KV when the
      prompt was finished.
    - `withdrawn`: tokens of early answers that became void.
    """

    chunks: Count = 0
    invalidated: Count = 0
    finished: Count = 0
    tokens: Count = 0
    computed_before: Count = 0
    withdrawn: Count = 0


class TransferReport(msgspec.Struct, kw_only=True):
    """KV sent to other workers and received from them. Either a request decodes at the other worker, or it is
    a cache copy, for which no client waits.

    - `handed_over`, `received`: sequences of requests, sent and received.
    - `arriving_copies`: copies sent of prompts that still arrive; `writebacks`: copies sent of finished
      requests; `received_copies`: copies of either kind received.
    - `failed`: transfers of all kinds that failed.
    - `sent_bytes`: bytes sent by all transfers; `arriving_bytes`, `writeback_bytes`: the bytes among them
      that were sent by copies of these two kinds.
    - `wire_seconds`: time on the wire; `exposed_seconds`: from a prompt's end until its KV had arrived;
      `hidden_seconds`: by how much each transfer, except write-backs, was longer on the wire than exposed.
    - `received_tokens`: tokens of received requests, of which `hit_tokens` were cached already and not sent;
      `copied_tokens`: tokens brought by copies.
    - `deferred`: requests whose reservation was deferred so that latency targets could be met.
    - `refused_writes`: attempts to write into blocks whose reservation was closed.

    The engine counts in it.
    """

    handed_over: Count = 0
    arriving_copies: Count = 0
    writebacks: Count = 0
    failed: Count = 0
    sent_bytes: Count = 0
    arriving_bytes: Count = 0
    writeback_bytes: Count = 0
    wire_seconds: Seconds = 0.0
    exposed_seconds: Seconds = 0.0
    hidden_seconds: Seconds = 0.0
    received: Count = 0
    received_tokens: Count = 0
    hit_tokens: Count = 0
    received_copies: Count = 0
    copied_tokens: Count = 0
    deferred: Count = 0
    refused_writes: Count = 0


class RemoteReport(msgspec.Struct, frozen=True, kw_only=True):
    """What remote draft services contributed to a worker so far.

    - `services`: present sessions.
    - `trees`: their trees, of which `late` ones came after the step they were requested for; `accepted`:
      accepted draft tokens.
    - `fallback_trees`, `fallback_accepted`: trees and accepted draft tokens of the fallback drafter, which
      drafts if they do not.
    - `moves`: sequences moved from one service to another.
    - `rejected`: rejected answers, by fault; `probations`: how often a service was suspended because of
      several such answers.
    """

    services: Present
    trees: Count
    late: Count
    accepted: Count
    fallback_trees: Count
    fallback_accepted: Count
    moves: Count
    rejected: CountsByKey = {}
    probations: Count = 0


class Report(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A worker's state, sent at least every half second while it works. Counters only grow.

    - `prefix_queries`: tokens of requests when they were first scheduled; `prefix_hits`: the cached tokens
      among them.
    - `step_floor_seconds`: the least time in which this machine could have done the steps' work, if it was
      profiled.
    - `corrupted_requests`: requests that ended because the model's outputs were not finite.
    - `standstill_seconds`: how long its steps have computed nothing although a sequence could be computed; 0
      after any other step.
    """

    running: Present
    waiting: Present
    blocks_total: Present
    blocks_live: Present
    steps: Count
    prompt_tokens: Count
    generation_tokens: Count
    prefix_queries: Count
    prefix_hits: Count
    preemptions: Count
    copies_on_write: Count
    step_seconds: Seconds
    step_parts: Annotated[StepParts | None, Merge.FIELDS] = None
    step_tokens: Annotated[StepTokens | None, Merge.FIELDS] = None
    speculation: Annotated[SpeculationReport | None, Merge.FIELDS] = None
    step_floor_seconds: Annotated[float | None, Merge.COMPLETE_COUNTER] = None
    evictions: Annotated[EvictionReport | None, Merge.FIELDS] = None
    streams: Annotated[StreamReport | None, Merge.FIELDS] = None
    transfer: Annotated[TransferReport | None, Merge.FIELDS] = None
    remote: Annotated[RemoteReport | None, Merge.FIELDS] = None
    corrupted_requests: Count = 0
    standstill_seconds: Annotated[float, Merge.LONGEST_STATE] = 0.0


class IncidentReport(msgspec.Struct, frozen=True, kw_only=True):
    """Incidents of a fleet so far.

    - `deaths`: deaths of worker processes, including failed starts.
    - `suspects`: requests that were in a lost step and ran isolated from then on. `quarantined`: suspects
      that wait for their trial, or are in it, now. `convicted`: requests that repeatedly ended their worker
      alone, and were refused.
    - `adopted`: workers taken over from another head. `resumed_outputs`, `resumed_tokens`: requests that
      began with outputs kept from another head, and the tokens of these outputs.
    """

    deaths: int = 0
    suspects: int = 0
    quarantined: int = 0
    convicted: int = 0
    crash_reports: int = 0
    observer_failures: int = 0
    adopted: int = 0
    resumed_outputs: int = 0
    resumed_tokens: int = 0
