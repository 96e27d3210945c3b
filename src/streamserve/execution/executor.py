"""TorchExecutor: run one forward pass over all spans of a step, sample, and compact the KV cache."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from streamserve.engine.plan import TARGET, Sampled, SequenceState, SpanResult, StepPlan, StepResult
from streamserve.execution.attention import AttentionBackend
from streamserve.execution.grammar import GrammarError, Grammars, Matcher
from streamserve.execution.kv_cache import KVCache
from streamserve.execution.layout import Layout, SpanRows, lay_out
from streamserve.execution.logprobs import token_logprobs
from streamserve.execution.model import Model
from streamserve.execution.rejection import verify_by_rejection
from streamserve.execution.sampling import (
    NOT_FINITE,
    Chooser,
    Ids,
    NotFiniteError,
    Row,
    Sampler,
    finite_rows,
)
from streamserve.execution.swap import HostPool
from streamserve.execution.verify import Walk, verify
from streamserve.protocol.messages import PromptLogprob
from streamserve.protocol.sampling import SamplingParams


@dataclass
class _Sequence:
    """State of a sequence kept between steps. The executor's own results extend `outputs` and advance the
    grammar's `matcher`. `error`: why the grammar cannot be followed."""

    params: SamplingParams
    prompt: list[int]
    prompt_ids: Ids
    outputs: list[int]
    matcher: Matcher | None = None
    error: str = ""


@dataclass(slots=True)
class _Branch:
    """One output choice of a span: its path down the span's token tree, whose root has logits row `root`."""

    part: SpanRows
    sequence: _Sequence
    choice: int
    root: int
    walk: Walk

    def row(self) -> Row:
        """Return the sampling inputs at the path's last node; the outputs include the tokens of the path."""
        sequence = self.sequence
        outputs = sequence.outputs + self.walk.tokens if self.walk.tokens else sequence.outputs
        node = self.root + self.walk.path[-1]
        allowed = sequence.matcher.allowed(self.walk.tokens) if sequence.matcher else None
        return Row(node, sequence.params, self.choice, sequence.prompt_ids, outputs, allowed)

    @property
    def finite(self) -> bool:
        """Whether every row of logits on the path was finite."""
        return self.walk.tokens[-1] != NOT_FINITE

    def ends(self, token: int) -> bool:
        """Return whether the sequence's grammar is complete after `token`."""
        return self.sequence.matcher is not None and self.sequence.matcher.ends(token)

    def commit(self) -> None:
        """Append the sampled tokens to the sequence and advance its grammar."""
        sequence = self.sequence
        sequence.outputs += self.walk.tokens
        if sequence.matcher:
            sequence.matcher.commit(self.walk.tokens)
            sequence.error = sequence.matcher.error


class TorchExecutor:
    """Run steps (engine.plan.Executor) with `model` and `attention` over the KV `cache`."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        attention: AttentionBackend,
        eos_token_ids: Sequence[int],
        grammars: Grammars | None = None,
        chooser: Chooser | None = None,
        host: HostPool | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammars = grammars
        self._chooser = chooser
        self._host = host
        self._sequences: dict[int, _Sequence] = {}

    @property
    def groups(self) -> int:
        return 1

    @property
    def grammars(self) -> Grammars | None:
        """The compiler of the requests' grammars, if there is one."""
        return self._grammars

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run `plan`. Raises ValueError for inconsistent spans, before any computation."""
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
        hidden = self._forward(layout)
        outputs = self._outputs(layout, hidden)
        finite = self._finite(layout, hidden)
        return [
            self._result(part, sampled, hidden, whole)
            for part, sampled, whole in zip(layout.parts, outputs, finite, strict=True)
        ]

    def _finite(self, layout: Layout, hidden: Tensor) -> list[bool]:
        """Return for each span whether the hidden states of its committed tokens are finite. If all of these
        rows have logits, the check is skipped: the logits are checked instead."""
        if all(part.root == part.offset and part.span.tree for part in layout.parts):
            return [True] * len(layout.parts)
        finite = finite_rows(hidden)
        return [bool(finite[part.offset : part.root + 1].all()) for part in layout.parts]

    def _result(
        self, part: SpanRows, sampled: list[list[Sampled]] | None, hidden: Tensor, finite: bool
    ) -> SpanResult:
        """Build the result of one span. `finite`: whether the hidden states of its committed tokens, and so
        their KV, are finite. `sampled` is None where the logits are not finite."""
        if finite and sampled is not None:
            logprobs = self._prompt_logprobs(part, hidden)
            if not logprobs or all(math.isfinite(entry.logprob) for entry in logprobs):
                return SpanResult(part.span.sequence, sampled, logprobs, self._error(part))
        return SpanResult(part.span.sequence, [], not_finite=True)

    def close(self) -> None:
        """Forget all sequences and release weights and caches."""
        self._sequences.clear()
        if self._host is not None:
            self._host.close()
            self._host = None
        del self._model, self._cache, self._attention

    def _error(self, part: SpanRows) -> str:
        sequence = self._sequences.get(part.span.sequence)
        return sequence.error if sequence else ""

    def _update_sequences(self, plan: StepPlan) -> None:
        for sequence in plan.released:
            self._sequences.pop(sequence, None)
        for state in plan.admitted:
            self._sequences[state.sequence] = _new_sequence(state, self._grammars)

    def _forward(self, layout: Layout) -> Tensor:
        """Return the hidden states [rows, hidden] of the step; writes its keys and values to the cache."""
        self._attention.plan(layout)
        tokens, positions = torch.from_numpy(layout.tokens), torch.from_numpy(layout.positions)
        return self._model.forward(tokens, positions, self._attention)

    def _outputs(self, layout: Layout, hidden: Tensor) -> list[list[list[Sampled]] | None]:
        """Return the new tokens of each span's choices, or None where the logits are not finite. Updates the
        sequences and compacts the cache."""
        branches = self._branches(layout)
        if not branches:
            return [[] for _ in layout.parts]
        sampled_rows = layout.sampled_rows()
        logits = self._model.logits(hidden if len(sampled_rows) == len(hidden) else hidden[sampled_rows])
        sampler = Sampler(logits, self._eos_token_ids, self._chooser)
        for branch in branches:
            if branch.walk.tree.draws:
                _verify_drawn(branch, sampler)
        shared_noise = [branch for branch in branches if not branch.walk.tree.draws]
        verify(
            [branch.walk for branch in shared_noise],
            lambda active: sampler.sample([shared_noise[number].row() for number in active]),
        )
        not_finite = {branch.part.span.sequence for branch in branches if not branch.finite}
        branches = [branch for branch in branches if branch.part.span.sequence not in not_finite]
        self._compact(branches)
        for branch in branches:
            # A sequence continues as its root's first choice; the others are admitted as separate sequences.
            if branch.choice == branch.part.span.choices[0]:
                branch.commit()
        sampled = iter(_with_logprobs(branches, logits))
        return [
            None
            if part.span.sequence in not_finite
            else []
            if part.span.tree is None
            else list(islice(sampled, len(part.span.choices)))
            for part in layout.parts
        ]

    def _branches(self, layout: Layout) -> list[_Branch]:
        branches, root = [], 0
        for part in layout.parts:
            tree = part.span.tree
            if tree is not None:
                sequence = self._sequences[part.span.sequence]
                for choice in part.span.choices:
                    branches.append(_Branch(part, sequence, choice, root, Walk(tree)))
                root += len(tree)
        return branches

    def _compact(self, branches: Sequence[_Branch]) -> None:
        """Move the keys and values of accepted nodes to the slots after the root, in order of position."""
        moves = []
        for branch in branches:
            if len(branch.walk.path) == 1:
                continue
            node_slots = branch.part.slots[len(branch.part.span.tokens) - 1 :]
            path = np.asarray(branch.walk.path)
            moves.append((node_slots[path], node_slots[: len(path)]))
        if not moves:
            return
        sources, destinations = np.concatenate(moves, axis=1)
        moved = sources != destinations
        self._cache.move_slots(sources[moved], destinations[moved])

    def _prompt_logprobs(self, part: SpanRows, hidden: Tensor) -> list[PromptLogprob]:
        """Return the log-probabilities of the prompt tokens that follow the span's rows."""
        span, count = part.span, part.span.prompt_logprobs
        if count is None:
            return []
        prompt = self._sequences[span.sequence].prompt
        targets = prompt[span.start + 1 : span.start + 1 + len(span.tokens)]
        rows = hidden[part.offset : part.offset + len(targets)]
        counts = [count] * len(targets)
        return token_logprobs(lambda piece: self._model.logits(rows[piece]), targets, counts)


def _verify_drawn(branch: _Branch, sampler: Sampler) -> None:
    params, output = branch.sequence.params, len(branch.sequence.outputs)
    try:
        verify_by_rejection(
            branch.walk, lambda: sampler.distribution(branch.row()), params.seed or 0, branch.choice, output
        )
    except NotFiniteError:
        branch.walk.tokens.append(NOT_FINITE)


def _new_sequence(state: SequenceState, grammars: Grammars | None) -> _Sequence:
    prompt_ids = np.unique(np.asarray(state.prompt, dtype=np.int64))
    sequence = _Sequence(state.params, state.prompt, prompt_ids, list(state.outputs))
    if state.params.grammar is not None:
        try:
            if grammars is None:
                raise GrammarError("this worker has no tokenizer, which a grammar needs")
            sequence.matcher = grammars.begin(state.params.grammar, state.outputs)
        except GrammarError as error:
            sequence.error = str(error)
    return sequence


def _with_logprobs(branches: Sequence[_Branch], logits: Tensor) -> list[list[Sampled]]:
    """Return the branches' tokens, with log-probabilities for the requests that ask for them."""
    with_logprobs = [branch for branch in branches if branch.sequence.params.logprobs is not None]
    if not with_logprobs:
        return [
            [Sampled(token, ends=branch.ends(token)) for token in branch.walk.tokens] for branch in branches
        ]
    rows = [branch.root + node for branch in with_logprobs for node in branch.walk.path]
    tokens = [token for branch in with_logprobs for token in branch.walk.tokens]
    counts = [branch.sequence.params.logprobs or 0 for branch in with_logprobs for _ in branch.walk.tokens]
    entries = iter(token_logprobs(lambda piece: logits[rows[piece]], tokens, counts))
    outputs = []
    for branch in branches:
        if branch.sequence.params.logprobs is None:
            outputs.append([Sampled(token, ends=branch.ends(token)) for token in branch.walk.tokens])
        else:
            own = islice(entries, len(branch.walk.tokens))
            outputs.append(
                [Sampled(entry.token, entry.logprob, entry.top, branch.ends(entry.token)) for entry in own]
            )
    return outputs
