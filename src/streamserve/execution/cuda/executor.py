"""DeviceExecutor: steps on a device. A step is launched without waiting; its results are read later.

launch    copies, forward pass, sampling, compaction: queued on the device, in order
finish    waits for the tokens; what needs the logits on the host (grammars, penalties, rejection) follows
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streamserve.engine.plan import TARGET, Sampled, SpanResult, StepPlan, StepResult
from streamserve.execution.branches import (
    ActiveSequence,
    Branch,
    accepted_moves,
    commit_branches,
    new_sequence,
    sample_branches,
    with_logprobs,
)
from streamserve.execution.cuda.draws import Draw, pack_draws
from streamserve.execution.cuda.passes import Nodes
from streamserve.execution.cuda.runner import Fetch, Runner
from streamserve.execution.cuda.swap import DeviceHostPool, Swapping
from streamserve.execution.grammar import Grammars
from streamserve.execution.layout import Layout, SpanRows, lay_out
from streamserve.execution.logprobs import token_logprobs
from streamserve.execution.sampling import Sampler
from streamserve.execution.verify import Walk
from streamserve.protocol.messages import PromptLogprob


@dataclass
class _Launched:
    """A step whose results have not been read. `walked` branches are verified on the device, `others` need
    their `logits` on the host; a branch's `root` is its row of the logits. `hidden` are the rows' states.
    `compiled`: whether kernels were compiled or graphs captured to launch it."""

    layout: Layout
    walked: list[Branch]
    others: list[Branch]
    logits: Tensor | None
    hidden: Tensor
    fetch: Fetch
    prompt_logprobs: dict[int, list[PromptLogprob]]
    compiled: bool


class DeviceExecutor:
    """Runs steps (engine.plan.Executor) with `runner`. Up to two steps may be launched before the first is
    finished."""

    def __init__(
        self,
        runner: Runner,
        eos_token_ids: Sequence[int],
        grammars: Grammars | None = None,
        host: DeviceHostPool | None = None,
    ) -> None:
        self._runner = runner
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammars = grammars
        self._host = host
        self._sequences: dict[int, ActiveSequence] = {}
        self._queue: deque[tuple[_Launched | None, Swapping | None]] = deque()
        self._trees: dict[int, int] = {}
        """The tree of each sequence that continues in the last launched step."""

    @property
    def grammars(self) -> Grammars | None:
        """The compiler of the requests' grammars, if there is one."""
        return self._grammars

    @property
    def firsts(self) -> int:
        """Runs that compiled kernels or captured a graph, or are about to."""
        return int(self._runner.graphs.firsts)

    def run(self, plan: StepPlan) -> StepResult:
        """Run `plan`. Raises ValueError for inconsistent spans, before any computation."""
        self.launch(plan)
        return self.finish()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Queue `plan` on the device. Raises ValueError for inconsistent spans, before any computation."""
        if (plan.swap_out or plan.swap_in) and self._host is None:
            raise ValueError("this executor has no host pool for swapped KV")
        if any(span.group != TARGET for span in plan.spans):
            raise ValueError("this executor has one KV cache group, the target's")
        layout = lay_out(plan.spans, self._runner.cache.block_size)
        self._update_sequences(plan)
        swapping = self._host.begin(plan.swap_out, plan.swap_in) if self._host else None
        self._runner.copy_blocks(plan.copies)
        self._queue.append((self._launch(layout) if plan.spans else None, swapping))

    def can_follow(self) -> bool:
        """Return whether the step launched last chooses all its tokens on the device and needs no logits when
        it is finished."""
        launched, _ = self._queue[-1]
        return launched is not None and not (
            launched.others or any(branch.sequence.params.logprobs is not None for branch in launched.walked)
        )

    @torch.inference_mode()
    def finish(self) -> StepResult:
        """Return the results of the earliest launched step, waiting for it."""
        compiled = any(step.compiled for step, _ in self._queue if step)
        launched, swapping = self._queue.popleft()
        spans = self._finish(launched) if launched else []
        if launched:
            self._runner.cache.written += len(self._runner.cache.data)
        return StepResult(spans, swap_seconds=swapping.wait() if swapping else 0.0, compiled=compiled)

    def close(self) -> None:
        """Forget all sequences and release weights and caches."""
        self._queue.clear()
        self._sequences.clear()
        if self._host is not None:
            self._host.close()
            self._host = None
        self._runner.close()
        del self._runner

    def _update_sequences(self, plan: StepPlan) -> None:
        for sequence in plan.released:
            self._sequences.pop(sequence, None)
        for state in plan.admitted:
            self._sequences[state.sequence] = new_sequence(state, self._grammars)

    def _launch(self, layout: Layout) -> _Launched:
        branches = self._branches(layout)
        walked = [branch for branch in branches if chosen_on_device(branch)]
        others = [branch for branch in branches if not chosen_on_device(branch)]
        firsts = self._runner.graphs.firsts
        hidden = self._runner.forward(layout, self._sources(layout))
        self._trees = {
            branch.part.span.sequence: tree
            for tree, branch in enumerate(walked)
            if branch.choice == branch.part.span.choices[0]
        }
        logits = self._runner.sample(_nodes(walked, others)) if branches else None
        # Rows with logits need no check of their own: logits of states that are not finite are not either.
        checked = not all(part.root == part.offset and part.span.tree for part in layout.parts)
        fetch = self._runner.fetch(hidden if checked else None)
        logprobs, compiled = self._prompt_logprobs(layout, hidden), self._runner.graphs.firsts > firsts
        return _Launched(layout, walked, others, logits, hidden, fetch, logprobs, compiled)

    def _sources(self, layout: Layout) -> dict[int, int]:
        """Return for each span (by its number) whose token the step before sampled, the tree it is from."""
        return {
            number: self._trees[part.span.sequence]
            for number, part in enumerate(layout.parts)
            if part.span.follows
        }

    def _branches(self, layout: Layout) -> list[Branch]:
        return [
            Branch(part, self._sequences[part.span.sequence], choice, 0, Walk(part.span.tree))
            for part in layout.parts
            if part.span.tree is not None
            for choice in part.span.choices
        ]

    def _prompt_logprobs(self, layout: Layout, hidden: Tensor) -> dict[int, list[PromptLogprob]]:
        """Return the log-probabilities of the prompt tokens that follow each sequence's rows, for the
        requests that ask for them. Waits for the device."""
        return {
            part.span.sequence: self._span_logprobs(part, hidden, part.span.prompt_logprobs)
            for part in layout.parts
            if part.span.prompt_logprobs is not None
        }

    def _span_logprobs(self, part: SpanRows, hidden: Tensor, count: int) -> list[PromptLogprob]:
        span = part.span
        prompt = self._sequences[span.sequence].prompt
        targets = prompt[span.start + 1 : span.start + 1 + len(span.tokens)]
        rows = hidden[part.offset : part.offset + len(targets)]
        return token_logprobs(lambda piece: self._runner.logits(rows[piece]), targets, [count] * len(targets))

    def _finish(self, launched: _Launched) -> list[SpanResult]:
        launched.fetch.wait()
        walks = launched.fetch.walks(len(launched.walked))
        for branch, (tokens, path) in zip(launched.walked, walks, strict=True):
            branch.walk.tokens, branch.walk.path = tokens, path
        if launched.others:
            self._sample_on_host(launched)
        branches = launched.walked + launched.others
        not_finite = {branch.part.span.sequence for branch in branches if not branch.finite}
        branches = [branch for branch in branches if branch.part.span.sequence not in not_finite]
        commit_branches(branches)
        logits = torch.empty(0) if launched.logits is None else launched.logits
        sampled: dict[int, list[list[Sampled]]] = {}
        for branch, outputs in zip(branches, with_logprobs(branches, logits), strict=True):
            sampled.setdefault(branch.part.span.sequence, []).append(outputs)
        return [
            SpanResult(part.span.sequence, [], not_finite=True)
            if part.span.sequence in not_finite or not _finite(part, launched)
            else self._result(part, sampled, launched)
            for part in launched.layout.parts
        ]

    def _sample_on_host(self, launched: _Launched) -> None:
        """Verify the branches that need their logits on the host, and move their accepted nodes' KV."""
        assert launched.logits is not None
        first = launched.others[0].root
        logits = launched.logits[first:].cpu()
        self._runner.waits += 1
        for branch in launched.others:
            branch.root -= first
        sample_branches(launched.others, Sampler(logits, self._eos_token_ids))
        for branch in launched.others:
            branch.root += first
        finite = [branch for branch in launched.others if branch.finite]
        self._runner.move_slots(*accepted_moves(finite))

    def _result(
        self, part: SpanRows, sampled: dict[int, list[list[Sampled]]], launched: _Launched
    ) -> SpanResult:
        name = part.span.sequence
        sequence = self._sequences.get(name)
        error = sequence.error if sequence else ""
        return SpanResult(name, sampled.get(name, []), launched.prompt_logprobs.get(name, []), error)


def chosen_on_device(branch: Branch) -> bool:
    """Return whether a branch's tokens depend only on its logits, temperature, filters and noise."""
    sequence, params = branch.sequence, branch.sequence.params
    return not (
        branch.walk.tree.draws
        or sequence.matcher is not None
        or params.penalized
        or params.logit_bias
        or params.allowed_token_ids
        or len(sequence.outputs) < params.min_tokens
    )


def _finite(part: SpanRows, launched: _Launched) -> bool:
    """Return whether the hidden states of a span's committed tokens, and so their KV, are finite, and its
    prompt log-probabilities."""
    finite = launched.fetch.finite
    logprobs = launched.prompt_logprobs.get(part.span.sequence, [])
    return (finite is None or bool(finite[part.offset : part.root + 1].all())) and all(
        math.isfinite(entry.logprob) for entry in logprobs
    )


def _nodes(walked: Sequence[Branch], others: Sequence[Branch]) -> Nodes:
    """Return the nodes of all trees, and set each branch's `root` to the row of its root's logits."""
    draws: list[Draw] = []
    rows: list[int] = []
    tokens: list[int] = []
    parents: list[int] = []
    slots: list[int] = []
    firsts, depth = [0], 1
    for branch in [*walked, *others]:
        part, tree, sequence = branch.part, branch.walk.tree, branch.sequence
        branch.root = len(rows)
        output = len(sequence.outputs) + part.span.follows
        depths = tree.depths() if len(tree) > 1 else (0,)
        rows += range(part.root, part.root + len(tree))
        draws += [Draw(sequence.params, branch.choice, output + level) for level in depths]
        tokens += tree.tokens
        parents += tree.parents
        slots += part.slots[len(part.span.tokens) - 1 :].tolist()
        if len(firsts) <= len(walked):
            firsts.append(len(rows))
            depth = max(depth, max(depths) + 1)
    return Nodes(
        rows=np.array(rows, np.int32),
        tokens=np.array(tokens, np.int32),
        parents=np.array(parents, np.int32),
        slots=np.array(slots, np.int32),
        firsts=np.array(firsts, np.int32),
        draws=pack_draws(draws),
        depth=depth,
    )
