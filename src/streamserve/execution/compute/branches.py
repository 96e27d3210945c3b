"""The state of an executor's sequences, and the branches of a step: output choices that walk down token
trees."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
from torch import Tensor

from streamserve.contracts.plan import Sampled, SequenceState
from streamserve.execution.compute.grammar import GrammarError, Grammars, Matcher
from streamserve.execution.compute.logprobs import token_logprobs
from streamserve.execution.compute.rejection import verify_by_rejection
from streamserve.execution.compute.running_sum import RunningSum
from streamserve.execution.compute.sampling import NOT_FINITE, Ids, NotFiniteError, Row, Sampler
from streamserve.execution.compute.verify import Walk, verify
from streamserve.execution.model.layout import Ints, SpanRows
from streamserve.protocol.messages import PromptLogprob
from streamserve.protocol.sampling import SamplingParams

NO_SLOTS: Ints = np.empty(0, np.int64)


@dataclass
class ActiveSequence:
    """The state of a sequence between steps. The executor's results extend `outputs` and advance the
    grammar's `matcher`. `error`: why the grammar cannot be followed; empty if it can. `sum`: the sum of its
    hidden states, for mean pooling."""

    params: SamplingParams
    prompt: list[int]
    prompt_ids: Ids
    outputs: list[int]
    matcher: Matcher | None = None
    error: str = ""
    sum: RunningSum | None = None

    @cached_property
    def adjusted(self) -> bool:
        """Whether the request's parameters may change the logits of any output before its token is chosen."""
        params = self.params
        return bool(
            self.matcher is not None or params.penalized or params.logit_bias or params.allowed_token_ids
        )


@dataclass(slots=True)
class Branch:
    """One output choice of a span, and its `walk` down the span's token tree. `root` is the row of the tree's
    root in the logits."""

    part: SpanRows
    sequence: ActiveSequence
    choice: int
    root: int
    walk: Walk

    def row(self) -> Row:
        """Return the sampling inputs at the path's last node. The outputs include the walk's tokens."""
        sequence = self.sequence
        outputs = sequence.outputs + self.walk.tokens if self.walk.tokens else sequence.outputs
        node = self.root + self.walk.path[-1]
        allowed = sequence.matcher.allowed(self.walk.tokens) if sequence.matcher else None
        return Row(node, sequence.params, self.choice, sequence.prompt_ids, outputs, allowed)

    @property
    def finite(self) -> bool:
        """Whether all logits on the path were finite."""
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


def sample_branches(branches: Sequence[Branch], sampler: Sampler) -> None:
    """Complete the walks of `branches`, whose `root` rows are rows of the sampler's logits."""
    for branch in branches:
        if branch.walk.tree.draws:
            _verify_drawn(branch, sampler)
    shared_noise = [branch for branch in branches if not branch.walk.tree.draws]
    verify(
        [branch.walk for branch in shared_noise],
        lambda active: sampler.sample([shared_noise[number].row() for number in active]),
    )


def accepted_moves(branches: Sequence[Branch]) -> tuple[Ints, Ints]:
    """Return the slots (sources, destinations) of the moves that bring the keys and values of accepted nodes
    into position order after the root."""
    moves = []
    for branch in branches:
        if len(branch.walk.path) == 1:
            continue
        node_slots = branch.part.slots[len(branch.part.span.tokens) - 1 :]
        path = np.asarray(branch.walk.path)
        moves.append((node_slots[path], node_slots[: len(path)]))
    if not moves:
        return NO_SLOTS, NO_SLOTS
    sources, destinations = np.concatenate(moves, axis=1)
    moved = sources != destinations
    return sources[moved], destinations[moved]


def commit_branches(branches: Sequence[Branch]) -> None:
    """Append the tokens of each span's first choice to the sequence, which goes on as that choice. The engine
    admits the other choices as separate sequences."""
    for branch in branches:
        if branch.choice == branch.part.span.choices[0]:
            branch.commit()


def _verify_drawn(branch: Branch, sampler: Sampler) -> None:
    params, output = branch.sequence.params, len(branch.sequence.outputs)
    try:
        verify_by_rejection(
            branch.walk, lambda: sampler.distribution(branch.row()), params.seed or 0, branch.choice, output
        )
    except NotFiniteError:
        branch.walk.tokens.append(NOT_FINITE)


def new_sequence(state: SequenceState, grammars: Grammars | None) -> ActiveSequence:
    """Return the state of an admitted sequence. If its grammar cannot be followed, `error` says why."""
    prompt_ids = np.unique(np.asarray(state.prompt, dtype=np.int64))
    sequence = ActiveSequence(state.params, state.prompt, prompt_ids, list(state.outputs))
    if state.params.grammar is not None:
        try:
            if grammars is None:
                raise GrammarError("this worker has no tokenizer, which a grammar needs")
            sequence.matcher = grammars.begin(state.params.grammar, state.outputs)
        except GrammarError as error:
            sequence.error = str(error)
    return sequence


def with_logprobs(branches: Sequence[Branch], logits: Tensor) -> list[list[Sampled]]:
    """Return the tokens of each branch, with log-probabilities for requests that ask for them."""
    with_logprobs = [branch for branch in branches if branch.sequence.params.logprobs is not None]
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


def prompt_logprobs(
    part: SpanRows,
    sequences: Mapping[int, ActiveSequence],
    hidden: Tensor,
    logits: Callable[[Tensor], Tensor],
) -> list[PromptLogprob]:
    """Return the log-probabilities of the prompt tokens after each of the span's committed tokens, if they
    are requested. `logits` returns the logits of rows of the step's `hidden` states."""
    span, count = part.span, part.span.prompt_logprobs
    if count is None:
        return []
    prompt = sequences[span.sequence].prompt
    targets = prompt[span.start + 1 : span.start + 1 + len(span.tokens)]
    rows = hidden[part.offset : part.offset + len(targets)]
    return token_logprobs(lambda piece: logits(rows[piece]), targets, [count] * len(targets))
