"""DeviceExecutor: steps on a device. A step is launched without waiting; its results are read later.

launch    queues on the device, in order: block copies, forward pass, sampling, compaction
finish    waits for the tokens, then samples on the host for requests that need their logits there (grammars,
          penalties, rejection sampling)
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from streamserve.contracts.plan import TARGET, Sampled, SpanResult, StepPlan, StepResult
from streamserve.execution.backends.cuda.decoding import Decoding, DecodingStep
from streamserve.execution.backends.cuda.draws import Draw, pack_draws, pack_outputs, pack_params
from streamserve.execution.backends.cuda.graphs import Graphs
from streamserve.execution.backends.cuda.passes import Nodes
from streamserve.execution.backends.cuda.runner import Fetch
from streamserve.execution.backends.cuda.swap import DeviceHostPool, Swapping
from streamserve.execution.compute.branches import (
    ActiveSequence,
    Branch,
    accepted_moves,
    commit_branches,
    new_sequence,
    prompt_logprobs,
    sample_branches,
    with_logprobs,
)
from streamserve.execution.compute.grammar import Grammars
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.compute.sampling import Sampler
from streamserve.execution.compute.verify import Walk
from streamserve.execution.model.layout import Ints, Layout, SpanRows, lay_out
from streamserve.protocol.messages import PromptLogprob


@dataclass
class _Launched:
    """A step whose results have not been read.

    * `walked`, `others`: branches that are verified on the device, and branches that need their logits on the
      host. A branch's `root` is the row of its root in `logits`.
    * `hidden`: the hidden states of the step's rows.
    * `compiled`: whether kernels were compiled or graphs captured to launch the step.
    """

    layout: Layout
    walked: list[Branch]
    others: list[Branch]
    logits: Tensor | None
    hidden: Tensor
    fetch: Fetch
    prompt_logprobs: dict[int, list[PromptLogprob]]
    compiled: bool


@dataclass(frozen=True)
class _Decoded:
    """A decoding step whose tokens have not been read."""

    step: DecodingStep
    fetch: Fetch
    compiled: bool


class StepRunner(Protocol):
    """The runner of an executor: a Runner or, for a model with several ranks, a LeadingRunner
    (cuda/ranks.py). See Runner for the methods."""

    waits: int

    @property
    def cache(self) -> KVCache: ...

    @property
    def graphs(self) -> Graphs: ...

    def forward(self, layout: Layout, sources: Mapping[int, int] | None = None) -> Tensor: ...

    def sample(self, nodes: Nodes) -> Tensor: ...

    def fetch(self, rows: Tensor | None) -> Fetch: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None: ...

    def move_slots(self, sources: Ints, destinations: Ints) -> None: ...

    def close(self) -> None: ...


class DeviceExecutor:
    """Runs steps (contracts.plan.Executor) with `runner`. Up to two steps may be launched before the first is
    finished."""

    def __init__(
        self,
        runner: StepRunner,
        eos_token_ids: Sequence[int],
        grammars: Grammars | None = None,
        host: DeviceHostPool | None = None,
    ) -> None:
        self._runner = runner
        self._eos_token_ids = tuple(eos_token_ids)
        self.grammars = grammars
        """The compiler of the requests' grammars, or None."""
        self._host = host
        self._sequences: dict[int, ActiveSequence] = {}
        self._packed: dict[int, bytes] = {}
        """The packed parameters of each sequence's draws (draws.pack_params)."""
        self._decoding = Decoding(runner.cache.block_size)
        self._queue: deque[tuple[_Launched | _Decoded | None, Swapping | None]] = deque()
        self._trees: dict[int, int] = {}
        """The tree of each sequence in the last launched step whose token the next step may take on the
        device."""

    @property
    def firsts(self) -> int:
        """Number of passes that compiled kernels or captured a graph, the current one included."""
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
        step = self._decoding.follow(plan.spans)
        layout = step.layout if step else lay_out(plan.spans, self._runner.cache.block_size)
        self._update_sequences(plan)
        swapping = self._host.begin(plan.swap_out, plan.swap_in) if self._host else None
        self._runner.copy_blocks(plan.copies)
        launched: _Launched | _Decoded | None = None
        if plan.spans:
            sources = step.sources if step else self._sources(layout)
            step = step or self._decoding.begin(layout, self._sequences, self._packed, sources)
            launched = self._launch_decoding(step) if step else self._launch(layout, sources)
        self._queue.append((launched, swapping))

    def can_follow(self) -> bool:
        """Return whether the last launched step chooses all its tokens on the device, and needs no logits
        when it is finished."""
        launched, _ = self._queue[-1]
        if launched is None or isinstance(launched, _Decoded):
            return launched is not None
        return not (
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
            self._packed.pop(sequence, None)
        for state in plan.admitted:
            self._packed[state.sequence] = pack_params(state.params)
            self._sequences[state.sequence] = new_sequence(state, self.grammars)

    def _launch_decoding(self, step: DecodingStep) -> _Decoded:
        firsts = self._runner.graphs.firsts
        self._runner.forward(step.layout, step.sources)
        self._trees = dict(zip(step.ids, range(len(step.ids)), strict=True))
        self._runner.sample(step.nodes)
        return _Decoded(step, self._runner.fetch(None), self._runner.graphs.firsts > firsts)

    def _launch(self, layout: Layout, sources: Mapping[int, int]) -> _Launched:
        branches = self._branches(layout)
        walked, others = divided(branches)
        firsts = self._runner.graphs.firsts
        hidden = self._runner.forward(layout, sources)
        self._trees = {
            branch.part.span.sequence: tree
            for tree, branch in enumerate(walked)
            if branch.choice == branch.part.span.choices[0]
        }
        logits = self._runner.sample(self._nodes(layout, walked, others)) if branches else None
        # Rows with logits need no check here: states that are not finite give logits that are not finite.
        checked = not all(part.root == part.offset and part.span.tree for part in layout.parts)
        fetch = self._runner.fetch(hidden if checked else None)
        logprobs, compiled = self._prompt_logprobs(layout, hidden), self._runner.graphs.firsts > firsts
        return _Launched(layout, walked, others, logits, hidden, fetch, logprobs, compiled)

    def _sources(self, layout: Layout) -> dict[int, int]:
        """Return, for each span (by its number) whose token the previous step sampled, the number of the tree
        that the token is from."""
        return {
            number: self._trees[part.span.sequence]
            for number, part in enumerate(layout.parts)
            if part.span.follows
        }

    def _branches(self, layout: Layout) -> list[Branch]:
        sequences = self._sequences
        return [
            Branch(part, sequences[span.sequence], choice, 0, Walk(span.tree))
            for part in layout.parts
            for span in (part.span,)
            if span.tree is not None
            for choice in span.choices
        ]

    def _nodes(self, layout: Layout, walked: Sequence[Branch], others: Sequence[Branch]) -> Nodes:
        """Return the nodes of all trees, and set each branch's `root` to the row of its root's logits."""
        branches = [*walked, *others] if others else walked
        if any(len(branch.walk.tree.tokens) > 1 for branch in branches):
            return _tree_nodes(walked, others)
        for number, branch in enumerate(branches):
            branch.root = number
        rows = np.array([branch.part.root for branch in branches], np.int32)
        packed = self._packed
        draws = pack_outputs(
            [packed[branch.part.span.sequence] for branch in branches],
            [branch.choice for branch in branches],
            [len(branch.sequence.outputs) + branch.part.span.follows for branch in branches],
        )
        return Nodes(
            rows=rows,
            tokens=layout.tokens[rows].astype(np.int32),
            parents=np.full(len(rows), -1, np.int32),
            slots=layout.slots[rows].astype(np.int32),
            firsts=np.arange(len(walked) + 1, dtype=np.int32),
            draws=draws,
            depth=1,
        )

    def _prompt_logprobs(self, layout: Layout, hidden: Tensor) -> dict[int, list[PromptLogprob]]:
        """Return the log-probabilities of the prompt tokens that follow each sequence's rows, for the
        requests that ask for them. Waits for the device."""
        return {
            part.span.sequence: prompt_logprobs(part, self._sequences, hidden, self._runner.logits)
            for part in layout.parts
            if part.span.prompt_logprobs is not None
        }

    def _finish(self, launched: _Launched | _Decoded) -> list[SpanResult]:
        launched.fetch.wait()
        if isinstance(launched, _Decoded):
            return launched.step.commit(launched.fetch.tokens(len(launched.step.ids)))
        walks = launched.fetch.walks(len(launched.walked))
        for branch, (tokens, path) in zip(launched.walked, walks, strict=True):
            branch.walk.tokens, branch.walk.path = tokens, path
        if launched.others:
            self._sample_on_host(launched)
        branches = launched.walked + launched.others
        not_finite = {branch.part.span.sequence for branch in branches if not branch.finite}
        if not_finite:
            branches = [branch for branch in branches if branch.part.span.sequence not in not_finite]
        commit_branches(branches)
        logits = torch.empty(0) if launched.logits is None else launched.logits
        sampled: dict[int, list[list[Sampled]]] = {}
        for branch, outputs in zip(branches, with_logprobs(branches, logits), strict=True):
            sampled.setdefault(branch.part.span.sequence, []).append(outputs)
        not_finite |= _not_finite(launched)
        return [
            SpanResult(part.span.sequence, [], not_finite=True)
            if part.span.sequence in not_finite
            else self._result(part, sampled, launched)
            for part in launched.layout.parts
        ]

    def _sample_on_host(self, launched: _Launched) -> None:
        """Verify the branches that need their logits on the host, and move the KV of their accepted nodes."""
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


def divided(branches: Sequence[Branch]) -> tuple[list[Branch], list[Branch]]:
    """Return the branches whose tokens are chosen on the device, and all other branches."""
    chosen = list(map(chosen_on_device, branches))
    return list(compress(branches, chosen)), [
        branch for branch, on_device in zip(branches, chosen, strict=True) if not on_device
    ]


def chosen_on_device(branch: Branch) -> bool:
    """Return whether a branch's tokens depend only on its logits, temperature, filters and noise."""
    sequence = branch.sequence
    return not (
        sequence.adjusted or branch.walk.tree.draws or len(sequence.outputs) < sequence.params.min_tokens
    )


def _not_finite(launched: _Launched) -> set[int]:
    """Return the sequences with numbers that are not finite: hidden states of committed tokens, whose KV is
    then not finite either, or prompt log-probabilities."""
    finite = launched.fetch.finite
    sequences = {
        sequence
        for sequence, logprobs in launched.prompt_logprobs.items()
        if not all(math.isfinite(entry.logprob) for entry in logprobs)
    }
    if finite is not None and not finite[: len(launched.hidden)].all():
        sequences |= {
            part.span.sequence
            for part in launched.layout.parts
            if not finite[part.offset : part.root + 1].all()
        }
    return sequences


def _tree_nodes(walked: Sequence[Branch], others: Sequence[Branch]) -> Nodes:
    """Do the work of `DeviceExecutor._nodes` for trees with any number of nodes."""
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
