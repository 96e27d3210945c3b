"""A worker's report with a value in every field."""

from streamserve.protocol.reports import Report, SpeculationReport, StepParts, StepTokens, TransferReport

REPORT = Report(
    running=3, waiting=4, blocks_total=10, blocks_live=5, steps=6, prompt_tokens=7, generation_tokens=8,
    prefix_queries=9, prefix_hits=2, preemptions=1, copies_on_write=0, step_seconds=0.5,
    step_parts=StepParts(scheduling=0.05, draft=0.1, target=0.3),
    step_tokens=StepTokens(counts=[2, 3, *[0] * 11, 1], total=20_030),
    speculation=SpeculationReport(
        drafts=8, drafted=30, verified=15, accepted=9, expected=8.5, accepted_at=[5, 3, 1],
        trees_by_nodes=[2, 0, 3, 1], trees_by_depth=[3, 2, 1], draft_seconds=0.1, select_seconds=0.01,
    ),
    transfer=TransferReport(
        handed_over=7, arriving_copies=20, writebacks=5, sent_bytes=900, arriving_bytes=600,
        writeback_bytes=100, received_tokens=70, hit_tokens=50,
    ),
)  # fmt: skip
