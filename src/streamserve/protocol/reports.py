"""A worker's reports, sent twice a second: its state, and counters since its start."""

import msgspec


class SpeculationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Speculation so far, of a worker that has a drafter.

    - `drafts`, `drafted`: draft trees, and draft tokens in them; `verified`: draft tokens verified.
    - `accepted`: draft tokens that became outputs, so none after an end-of-text or stop token.
      `accepted_at[i]`: the accepted draft tokens of depth i + 1.
    - `expected`: accepted draft tokens as predicted before verification.
    - `trees_by_nodes[i]`, `trees_by_depth[i]`: verified trees with i + 1 draft tokens, and with i + 1 levels
      of them.
    """

    drafts: int
    drafted: int
    verified: int
    accepted: int
    expected: float
    accepted_at: list[int]
    trees_by_nodes: list[int]
    trees_by_depth: list[int]
    draft_seconds: float
    select_seconds: float


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histogram of tokens per step, equal to vLLM's."""


class StepTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Steps by their tokens: prompt tokens computed and tokens generated. `counts[i]`: steps with at most
    `STEP_TOKENS[i]` tokens and more than the bound before; the last count has all larger steps. `total`: the
    sum of all tokens."""

    counts: list[int]
    total: int


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of all steps by part: `scheduling` (step composition and selection of draft tokens),
    `draft` (drafting) and `target` (the executor). The rest of a step processes results: it updates
    statistics and creates events."""

    scheduling: float
    draft: float
    target: float


class EvictionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of evicted sequences so far. Predicted seconds are for the chosen way (swap or recompute), at
    the time of the choice. `swap_seconds` were spent on copies. `recompute_seconds` were spent on recomputing
    dropped KV: a share of each step, by query tokens."""

    swaps: int
    recomputes: int
    blocks_out: int
    blocks_back: int
    swap_predicted: float
    swap_seconds: float
    recompute_predicted: float
    recompute_seconds: float


class StreamReport(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt streams so far.

    - `chunks`: edits that changed a prompt; `invalidated`: tokens whose KV an edit dropped.
    - `finished`: finished prompts, `tokens`: their tokens, `computed_before`: tokens that had KV when the
      prompt was finished.
    - `withdrawn`: tokens of early answers that became void.
    """

    chunks: int
    invalidated: int
    finished: int
    tokens: int
    computed_before: int
    withdrawn: int


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """KV sent to other workers and received from them. Either a request decodes at the other worker, or it is
    a cache copy, for which no client waits.

    - `handed_over`, `received`: sequences of requests, sent and received.
    - `arriving_copies`: copies sent of prompts that still arrive; `writebacks`: copies sent of finished
      requests; `received_copies`: copies received, of both kinds.
    - `failed`: transfers of all kinds that failed.
    - `sent_bytes`: bytes of all kinds, of which `arriving_bytes` and `writeback_bytes` by copies of the two
      kinds.
    - `wire_seconds`: time on the wire; `exposed_seconds`: from a prompt's end until its KV had arrived;
      `hidden_seconds`: by how much each transfer, except write-backs, was longer on the wire than exposed.
    - `received_tokens`: tokens of received requests, of which `hit_tokens` were cached already and not sent;
      `copied_tokens`: tokens brought by copies.
    - `deferred`: requests whose reservation was deferred so that latency targets could be met.
    - `refused_writes`: attempts to write into blocks whose reservation was closed.
    """

    handed_over: int = 0
    arriving_copies: int = 0
    writebacks: int = 0
    failed: int = 0
    sent_bytes: int = 0
    arriving_bytes: int = 0
    writeback_bytes: int = 0
    wire_seconds: float = 0.0
    exposed_seconds: float = 0.0
    hidden_seconds: float = 0.0
    received: int = 0
    received_tokens: int = 0
    hit_tokens: int = 0
    received_copies: int = 0
    copied_tokens: int = 0
    deferred: int = 0
    refused_writes: int = 0


class RemoteReport(msgspec.Struct, frozen=True, kw_only=True):
    """What remote draft services contributed to a worker so far.

    - `services`: present sessions.
    - `trees`: their trees, of which `late` ones came after the step they were requested for; `accepted`:
      accepted draft tokens.
    - `fallback_trees`, `fallback_accepted`: trees and accepted draft tokens of the fallback drafter, which
      drafts if they do not.
    - `moves`: sequences moved from one service to another.
    - `rejected`: rejected answers, by fault; `probations`: of services that gave several such answers.
    """

    services: int
    trees: int
    late: int
    accepted: int
    fallback_trees: int
    fallback_accepted: int
    moves: int
    rejected: dict[str, int] = {}
    probations: int = 0


class Report(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A worker's state, sent at least every half second while it works. Counters only grow.

    - `prefix_queries`: tokens of requests when they were first scheduled; `prefix_hits`: of these, cached
      tokens.
    - `step_floor_seconds`: the least time in which this machine could have done the steps' work, if it was
      profiled.
    - `corrupted_requests`: requests that ended because the model's outputs were not finite.
    - `standstill_seconds`: how long its steps have computed nothing although a sequence could be computed; 0
      after any other step.
    """

    running: int
    waiting: int
    blocks_total: int
    blocks_live: int
    steps: int
    prompt_tokens: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    copies_on_write: int
    step_seconds: float
    step_parts: StepParts | None = None
    step_tokens: StepTokens | None = None
    speculation: SpeculationReport | None = None
    step_floor_seconds: float | None = None
    evictions: EvictionReport | None = None
    streams: StreamReport | None = None
    transfer: TransferReport | None = None
    remote: RemoteReport | None = None
    corrupted_requests: int = 0
    standstill_seconds: float = 0.0


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
