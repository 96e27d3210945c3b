"""What a worker tells of itself twice a second: its state, and counters since it began."""

import msgspec


class SpeculationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What guessing came to so far, of a worker that has a drafter. `accepted_at[i]`: guesses accepted at
    depth i + 1; `expected`: accepted ones as predicted before verification. `trees_by_nodes[i]` and
    `trees_by_depth[i]`: verified trees with i + 1 guesses, and those with i + 1 levels of them."""

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


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the seconds of all steps went: `scheduling` (what goes into a step, which guesses are worth it),
    `draft` (guessing) and `target` (the executor). What is left is taking results in: learning from them,
    and turning them into events."""

    scheduling: float
    draft: float
    target: float


class EvictionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of evicted sequences' KV so far. Predicted seconds are those of the way that was chosen,
    when it was; `swap_seconds` were spent on copies, `recompute_seconds` on computing again what had been
    dropped, as a share of steps by rows."""

    swaps: int
    recomputes: int
    blocks_out: int
    blocks_back: int
    swap_predicted: float
    swap_seconds: float
    recompute_predicted: float
    recompute_seconds: float


class StreamReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of prompts that arrived in parts so far. `chunks`: edits that changed a prompt;
    `invalidated`: tokens whose KV an edit dropped. Of the `finished` prompts' `tokens`, `computed_before`
    had KV when the prompt was finished; `withdrawn` early answers' tokens became void."""

    chunks: int
    invalidated: int
    finished: int
    tokens: int
    computed_before: int
    withdrawn: int


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """KV that went to other workers (`handed_over` sequences, `failed` ones) and came from them (`received`).
    `exposed_seconds`: from a prompt's end until its KV had landed; `wire_seconds`: all the time on the wire.
    Of `received_tokens` the `hit_tokens` were there already and not sent."""

    handed_over: int = 0
    failed: int = 0
    sent_bytes: int = 0
    wire_seconds: float = 0.0
    exposed_seconds: float = 0.0
    received: int = 0
    received_tokens: int = 0
    hit_tokens: int = 0


class RemoteReport(msgspec.Struct, frozen=True, kw_only=True):
    """What draft services elsewhere brought to a worker so far. `services` it has a session with now; their
    `trees`, those of them that were `late` for the step they were asked for, and guesses in them that the
    text followed. The same for the stand-in, which guesses where they do not. `moves` from one to another.
    Answers that were `rejected`, by what was wrong with them; `probations` of services that gave several."""

    services: int
    trees: int
    late: int
    accepted: int
    stand_in_trees: int
    stand_in_accepted: int
    moves: int
    rejected: dict[str, int] = {}
    probations: int = 0


class Report(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A worker's state, sent at least every half second while it works. Counters only ever grow.
    `step_floor_seconds`: the least time in which this machine could have done the steps' work, if it has
    been measured. `corrupted_requests`: those that ended because the model's numbers were not finite."""

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
    speculation: SpeculationReport | None = None
    step_floor_seconds: float | None = None
    evictions: EvictionReport | None = None
    streams: StreamReport | None = None
    transfer: TransferReport | None = None
    remote: RemoteReport | None = None
    corrupted_requests: int = 0


class IncidentReport(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong in a fleet so far. `deaths` of worker processes, failed starts too; `suspects`:
    requests that were in a lost step and so ran isolated from then on; `convicted` of them ended their worker
    alone again and again, and were given up; `quarantined` ones wait for their trial, or are on it, now."""

    deaths: int = 0
    suspects: int = 0
    quarantined: int = 0
    convicted: int = 0
    crash_reports: int = 0
    observer_failures: int = 0
