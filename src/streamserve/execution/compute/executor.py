"""The executor on a CPU: runs one forward pass over all spans of a step, samples, and compacts the KV
cache."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from streamserve.contracts.plan import TARGET, Sampled, SpanResult, StepPlan, StepResult
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
from streamserve.execution.compute.passes import ModelPasses
from streamserve.execution.compute.pooling import pool
from streamserve.execution.compute.sampling import Chooser, Sampler, finite_rows
from streamserve.execution.compute.swap import HostPool
from streamserve.execution.compute.verify import Walk
from streamserve.execution.model.attention import AttentionBackend
from streamserve.execution.model.forward import Model
from streamserve.execution.model.layout import Layout, SpanRows, lay_out
from streamserve.execution.model.lora.table import AdapterTable


class TorchExecutor:
    """Runs steps (contracts.plan.Executor) with `model` and `attention` over the KV `cache`. `adapters`: the
    LoRA adapters that requests may have."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        attention: AttentionBackend,
        eos_token_ids: Sequence[int],
        grammars: Grammars | None = None,
        chooser: Chooser | None = None,
        host: HostPool | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        self._passes = ModelPasses(model, attention, adapters)
        self._cache = cache
        self._eos_token_ids = tuple(eos_token_ids)
        self.grammars = grammars
        """The compiler of the requests' grammars, if there is one."""
        self._chooser = chooser
        self._host = host
        self._sequences: dict[int, ActiveSequence] = {}

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run `plan` and return its results. Raises ValueError for inconsistent spans, before any
        computation."""
        if not (plan.swap_out or plan.swap_in):
            return StepResult(self._run(plan))
        if self._host is None:
            raise ValueError("this executor has no host pool for swapped KV")
        with self._host.copying(plan.swap_out, plan.swap_in) as copies:
            spans = self._run(plan)
        return StepResult(spans, swap_seconds=copies.seconds)

    def _run(self, plan: StepPlan) -> list[SpanResult]:
        self._update_sequences(plan)
        self._cache.copy_blocks(plan.copies)
        if not plan.spans:
            return []
        if any(span.group != TARGET for span in plan.spans):
            raise ValueError("this executor has one KV cache group, the target's")
        layout = lay_out(plan.spans, self._cache.block_size)
        hidden = self._passes.forward(layout)
        outputs = self._outputs(layout, hidden)
        finite = self._finite(layout, hidden)
        pooled = pool(
            [part for part in layout.parts if self._is_pooled(part)],
            self._sequences,
            hidden,
            self._passes.logits,
        )
        return [
            _pooled(part, pooled, whole)
            if self._is_pooled(part)
            else self._result(part, sampled, hidden, whole)
            for part, sampled, whole in zip(layout.parts, outputs, finite, strict=True)
        ]

    def _is_pooled(self, part: SpanRows) -> bool:
        """Return whether the result of a span's sequence is a pooled vector."""
        sequence = self._sequences.get(part.span.sequence)
        return sequence is not None and sequence.params.pooling is not None

    def _finite(self, layout: Layout, hidden: Tensor) -> list[bool]:
        """Return, for each span, whether the hidden states of its committed tokens are finite. If all these
        rows have logits, the check is skipped, because sampling checks the logits."""
        if all(p.root == p.offset and p.span.tree and not self._is_pooled(p) for p in layout.parts):
            return [True] * len(layout.parts)
        finite = finite_rows(hidden)
        return [bool(finite[part.offset : part.root + 1].all()) for part in layout.parts]

    def _result(
        self, part: SpanRows, sampled: list[list[Sampled]] | None, hidden: Tensor, finite: bool
    ) -> SpanResult:
        """Return the result of one span. `finite`: whether the hidden states of its committed tokens, and so
        their KV, are finite. `sampled` is None if the logits are not finite."""
        if finite and sampled is not None:
            logprobs = prompt_logprobs(part, self._sequences, hidden, self._passes.logits)
            if not logprobs or all(math.isfinite(entry.logprob) for entry in logprobs):
                return SpanResult(part.span.sequence, sampled, logprobs, self._error(part))
        return SpanResult(part.span.sequence, [], not_finite=True)

    def swap_to(self, host: HostPool) -> None:
        """Swap KV to `host` from now on. The executor closes the pool."""
        assert self._host is None
        self._host = host

    def close(self) -> None:
        """Forget all sequences and release weights and caches."""
        self._sequences.clear()
        if self._host is not None:
            self._host.close()
            self._host = None
        del self._passes, self._cache

    def _error(self, part: SpanRows) -> str:
        sequence = self._sequences.get(part.span.sequence)
        return sequence.error if sequence else ""

    def _update_sequences(self, plan: StepPlan) -> None:
        for sequence in plan.released:
            self._sequences.pop(sequence, None)
        for state in plan.admitted:
            self._sequences[state.sequence] = new_sequence(state, self.grammars)

    def _outputs(self, layout: Layout, hidden: Tensor) -> list[list[list[Sampled]] | None]:
        """Return the new tokens of each span's choices; None for a span whose logits are not finite. Updates
        the sequences, and compacts the cache."""
        branches = self._branches(layout)
        if not branches:
            return [[] for _ in layout.parts]
        sampled_rows = layout.sampled_rows()
        logits = self._passes.logits(hidden if len(sampled_rows) == len(hidden) else hidden[sampled_rows])
        sampler = Sampler(logits, self._eos_token_ids, self._chooser)
        sample_branches(branches, sampler)
        not_finite = {branch.part.span.sequence for branch in branches if not branch.finite}
        branches = [branch for branch in branches if branch.part.span.sequence not in not_finite]
        self._cache.move_slots(*accepted_moves(branches))
        commit_branches(branches)
        sampled = iter(with_logprobs(branches, logits))
        return [
            None
            if part.span.sequence in not_finite
            else []
            if part.span.tree is None or self._is_pooled(part)
            else list(islice(sampled, len(part.span.choices)))
            for part in layout.parts
        ]

    def _branches(self, layout: Layout) -> list[Branch]:
        branches, root = [], 0
        for part in layout.parts:
            tree = part.span.tree
            if tree is not None:
                sequence = self._sequences[part.span.sequence]
                for choice in part.span.choices if sequence.params.pooling is None else ():
                    branches.append(Branch(part, sequence, choice, root, Walk(tree)))
                root += len(tree)
        return branches


def _pooled(part: SpanRows, vectors: Mapping[int, bytes], finite: bool) -> SpanResult:
    """Return the result of a span with `pooling`. Its vector is in `vectors` if its prompt ends in this
    step."""
    vector = vectors.get(part.span.sequence)
    return SpanResult(part.span.sequence, [], not_finite=not finite or vector == b"", pooled=vector or b"")
