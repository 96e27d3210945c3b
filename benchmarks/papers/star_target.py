"""A *paced* target for star_rig.py, as a separate process: the real engine, scheduler and remote
drafter, with an executor that returns what the real target model generated when it was recorded, and sleeps
for its verification time, in place of N accelerators that this machine does not have.

Reads a job a line from standard input, writes what it measured as a line of JSON.
"""

import json
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import DRAFT, Drafter, Sampled, Span, SpanResult, StepPlan, StepResult
from streamserve.draft_service.target.client import TargetIdentity
from streamserve.engine.engine import Engine
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.curve import parse_endpoints, read_key_pair
from streamserve.protocol.messages import DraftVerified, ModelInfo, Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.controller import Speculation
from streamserve.workers.remote_drafter import RemoteDrafter

BLOCKS = 512


class PacedExecutor:
    """Runs plans with the recorded continuations of prompts. A step sleeps for `seconds`."""

    def __init__(self, texts: list[tuple[list[int], list[int]]], seconds: float) -> None:
        self._texts = {tuple(prompt): outputs for prompt, outputs in texts}
        self._sequences: dict[int, tuple[int, list[int]]] = {}
        self.seconds = seconds

    def run(self, plan: StepPlan) -> StepResult:
        until = time.monotonic() + self.seconds
        for id in plan.released:
            self._sequences.pop(id, None)
        for state in plan.admitted:
            self._sequences[state.sequence] = len(state.prompt), self._texts[tuple(state.prompt)]
        results = [self._span(span) for span in plan.spans]
        while (left := until - time.monotonic()) > 0:
            time.sleep(left)
        return StepResult(results)

    def close(self) -> None:
        self._sequences.clear()

    def _span(self, span: Span) -> SpanResult:
        if span.tree is None:
            return SpanResult(span.sequence, [])
        prompt, outputs = self._sequences[span.sequence]
        position = span.start + len(span.tokens) - prompt
        tokens, node = [outputs[position]], span.tree.child(0, outputs[position])
        while node is not None and position + len(tokens) < len(outputs):
            tokens.append(outputs[position + len(tokens)])
            node = span.tree.child(node, tokens[-1])
        return SpanResult(span.sequence, [[Sampled(token) for token in tokens]])


@dataclass
class Window:
    """Counts between the start and the end of a measurement."""

    start: float
    end: float
    tokens: int = 0
    rounds: int = 0
    trees: int = 0
    accepted: int = 0

    def holds(self, now: float) -> bool:
        return self.start <= now < self.end


def own_drafter(path: str) -> Drafter:
    """Return a draft model in this process, for comparison."""
    # loads torch, which runs without an own draft do not need
    from streamserve.execution.loading.load import (
        load,
        make_drafter,
    )

    config = ModelConfig(path=path, draft="none", threads=1, num_blocks=BLOCKS)
    return make_drafter(load(config), DRAFT)


def fallback(job: dict[str, Any]) -> Drafter | None:
    """Return an n-gram drafter if the job uses one as the fallback drafter; None otherwise."""
    if not job.get("fallback"):
        return None
    from streamserve.execution.drafters.ngram import NGramDrafter  # loads torch

    return NGramDrafter()


def make_engine(job: dict[str, Any], drafter: Drafter | None, executor: PacedExecutor) -> Engine:
    """Return an engine for one sequence at a time, like a target in the paper."""
    info = ModelInfo(
        architecture="paced", parameters=0, vocab_size=job["vocab_size"], max_model_len=4096,
        eos_token_ids=(), weight_bytes=0, dtype="none", row_invariant=True, fingerprint="paced",
    )  # fmt: skip
    config = EngineConfig(num_blocks=BLOCKS, max_num_seqs=1, max_model_len=4096)
    speculation = Speculation(parse_policy(job["policy"]), lambda tokens, kv: job["verify"])
    return Engine(config, info, executor, time.monotonic, drafter, speculation)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Serve recorded prompts one after another until the job's end; return the counts of its window."""
    texts = job["texts"][job["number"] % len(job["texts"]) :] + job["texts"]
    drafter: RemoteDrafter | Drafter | None = None
    if job.get("draft"):
        drafter = own_drafter(job["draft"])
    if job["endpoint"]:
        identity = TargetIdentity(
            job["tokenizer"], job["vocabulary"], f"paced-{job['number']}", job["vocab_size"]
        )
        own = read_key_pair(job["key"]) if job.get("key") else None
        endpoints = parse_endpoints(job["endpoint"])
        drafter = RemoteDrafter(identity, endpoints, own, job["number"], (), fallback(job))
    engine = make_engine(job, drafter, PacedExecutor(texts, job["verify"]))
    started = time.monotonic()
    window = Window(started + job["warm"], started + job["warm"] + job["seconds"])
    waiting = deque(texts)
    wrong, number, output, expected = 0, 0, [], []
    while time.monotonic() < window.end:
        if not engine.has_work:
            wrong += output != expected[: len(output)]
            prompt, expected = waiting[0]
            waiting.rotate(-1)
            number, output = number + 1, []
            params = SamplingParams(temperature=0.0, max_tokens=len(expected), ignore_eos=True)
            engine.handle(Submit(str(number), prompt, params, outputs={0: []}, arrival=time.monotonic()))
        events = engine.step()
        inside = window.holds(time.monotonic())
        window.rounds += inside
        for event in events:
            if isinstance(event, Token):
                output.append(event.token)
                window.tokens += inside
            elif isinstance(event, DraftVerified) and inside:
                window.trees += 1
                window.accepted += event.accepted
    if isinstance(drafter, RemoteDrafter):
        drafter.close()
    return {
        "tokens_per_second": window.tokens / job["seconds"],
        "rounds_per_second": window.rounds / job["seconds"],
        "share_with_trees": window.trees / max(window.rounds, 1),
        "accepted_per_tree": window.accepted / max(window.trees, 1),
        "wrong_texts": wrong,
    }


def main() -> None:
    """Run job after job until standard input closes."""
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
