"""The data of a step, plain enough to cross a socket, and the protocols of those that execute it.

plan      the engine ranks its sequences and allocates blocks       (engine/scheduler.py)
begin     the drafter starts drafting, collect returns its trees    (Drafter)
select    tree nodes and chunk sizes are fixed by the budget        (engine/scheduler.py)
run       copies, forward pass, sampling, compaction                (Executor)
commit    tokens are appended, events returned                      (engine/commit.py)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import msgspec

from streamserve.contracts.tree import TokenTree
from streamserve.protocol.messages import PromptLogprob, TopLogprob
from streamserve.protocol.sampling import SamplingParams

TARGET = 0
"""The KV cache group of the target model."""

DRAFT = 1
"""The KV cache group of a draft model, where there is one."""

UNKNOWN_TOKEN = 0
"""The token of a span whose token is on the device only."""


@dataclass(frozen=True)
class SequenceState:
    """Sampling state of a sequence: sent when it first joins a step (or was edited since), then updated by
    the executor from its own results. `prompt` and `outputs` are token ids."""

    sequence: int
    choice: int
    params: SamplingParams
    prompt: list[int]
    outputs: list[int]


class Span(msgspec.Struct, frozen=True, gc=False):
    """Query tokens of one sequence in one step.

    `tokens` are committed tokens at positions `start`, `start` + 1, …, whose KV this step computes in KV
    cache group `group`. A span that reaches the sequence's last committed token has a `tree` whose root is
    that token (`tokens[-1]`); the tree's other nodes are query tokens too, at position `start + len(tokens) -
    1 + depth`. Rows, in order: `tokens`, then tree nodes 1, 2, …, whose KV goes to the following slots, in
    node order.

    * `blocks`: the block table for positions 0 to `start + query_tokens - 1`.
    * Logits: none without a tree; for every tree node with one; for all of `tokens` if `prompt_logprobs`.
    * `choices`: the output choices sampled at the root: the sequence's own, or at the end of a fresh prompt
      all of the request's (they fork from it; such a tree has one node). The sequence goes on as the first of
      them, the others as separate sequences.
    * `follows`: the value of the span's one token is not known yet: it is the one that the step launched
      before samples for this sequence.
    * `adapter`: the LoRA adapter of its rows, by the hash of its files; empty: none.
    * `skip`: the first rows, left out of a pass because their KV is in its slots already. (Used for a draft
      model's pass over a tree's last level.)
    """

    sequence: int
    start: int
    tokens: list[int]
    blocks: list[int]
    tree: TokenTree | None = None
    choices: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    group: int = TARGET
    skip: int = 0
    follows: bool = False
    adapter: str = ""

    @property
    def query_tokens(self) -> int:
        """Number of query tokens, skipped ones included."""
        return len(self.tokens) + (0 if self.tree is None else len(self.tree.tokens) - 1)


@dataclass(frozen=True)
class StepPlan:
    """One step. The executor does things in this order: forget `released` sequences, take `admitted` ones,
    perform `copies` (source block, destination block; one after another, of the target's KV), run `spans`.

    Concurrently with all that, at any time until the step is over, it copies blocks of all KV cache groups to
    and from the host pool: `swap_out` (KV block, host block) and then `swap_in` (host block, KV block). No
    span or copy touches a block that these read or write.
    """

    step: int
    admitted: list[SequenceState]
    released: list[int]
    copies: list[tuple[int, int]]
    spans: list[Span]
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """A sampled token, with log-probabilities under the unprocessed distribution if the request asked for
    them. `ends`: the token ends the text whatever the parameters say, because its grammar is complete."""

    token: int
    logprob: float | None = None
    top: list[TopLogprob] | None = None
    ends: bool = False


class SpanResult(msgspec.Struct, frozen=True, gc=False):
    """Result of a span with a tree, or with prompt log-probabilities.

    `outputs[i]` are the new tokens of `Span.choices[i]`: the accepted path's, then one more. When the result
    is returned, the KV of `tokens` and of the accepted path lies in position order from `start` on.
    `prompt_logprobs[j]` is for the token at position `start + 1 + j`. With an `error` the outputs mean
    nothing, and the sequence cannot go on. The same holds where the model's logits were `not_finite` (NaN or
    infinite, before any mask); then its KV is not to be trusted either. `pooled` is the vector of a request
    with `pooling`, in its last span: float32 numbers.
    """

    sequence: int
    outputs: list[list[Sampled]]
    prompt_logprobs: list[PromptLogprob] = []
    error: str = ""
    not_finite: bool = False
    pooled: bytes = b""


@dataclass(frozen=True)
class StepResult:
    """One entry a span, in the plan's order. `seconds`: how long the step took, where no clock shows it. The
    swap copies took `swap_seconds`, concurrently with the rest. `compiled`: whether kernels were
    compiled or graphs captured for it, so that its time says nothing of other steps."""

    spans: list[SpanResult]
    seconds: float | None = None
    swap_seconds: float = 0.0
    compiled: bool = False


class Executor(Protocol):
    """Executes steps on tensors (execution/) or on a cost model (simulate/)."""

    def run(self, plan: StepPlan) -> StepResult:
        """Execute one step. Only the executor ever sees a KV cache that is not in position order."""
        ...

    def close(self) -> None:
        """Free the cache and all other resources."""
        ...


@runtime_checkable
class AsyncExecutor(Executor, Protocol):
    """An executor that need not be waited for. Steps run in the order in which they were launched; at most
    two are launched and not finished."""

    def launch(self, plan: StepPlan) -> None:
        """Begin to execute a step. Its spans may follow the step launched before (Span.follows)."""
        ...

    def can_follow(self) -> bool:
        """Return whether a step may follow the one launched last: all of its tokens are chosen where they are
        needed, and nothing of it is left to do when it is finished."""
        ...

    def finish(self) -> StepResult:
        """Return the result of the earliest step that was launched and not finished, waiting for it."""
        ...


@dataclass(frozen=True)
class DraftRequest:
    """Request a draft tree after the committed tokens of sequence `id`: the first `length` of `tokens`.

    `tokens` is the sequence's list itself, not a copy. It is not to be modified, and it may only be appended
    to afterwards. With another `epoch` than before, tokens, outputs and `params` may be others; what the
    drafter derived from earlier ones is void.

    The draft tokens are for output number `output` and the following ones of `choice`, sampled as `params`
    say: a drafter that uses the target's sampling noise drafts what the target will sample. `depth`, `width`
    and `nodes` are the tree's shape: levels, nodes a level, nodes in all, the root not counted. With an
    `expansion` each node of level l gets its best `expansion[l]` children, whatever their probabilities.

    With depth 0, a drafter with its own KV only computes the tokens' KV, and answers with a root.

    `need`: the seconds in which the sequence's next token is due for its target for the time per output
    token; None without one.

    A drafter with its own KV finds that of the first `computed` tokens in its KV cache group of `blocks`,
    writes that of the others, and may use the following slots for `nodes` draft tokens.

    `adapter`: the target's LoRA adapter for the sequence. Only a drafter that is part of the target has it.
    """

    id: int
    epoch: int
    tokens: list[int]
    length: int
    choice: int
    output: int
    params: SamplingParams
    depth: int
    width: int
    nodes: int
    computed: int
    blocks: list[int]
    expansion: tuple[int, ...] = ()
    adapter: str = ""
    need: float | None = None


class Drafter(Protocol):
    """Proposes draft tokens: a small model, n-gram lookup, early layers, or a remote service."""

    @property
    def group(self) -> int | None:
        """The KV cache group that a request's blocks hold for it: the target's, a separate one, or none."""
        ...

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Start drafting for these sequences."""
        ...

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        """Return the trees that are ready by `deadline` (the engine's clock); a missing one means no
        speculation. A sequence with a tree has KV for all its committed tokens in the drafter's KV cache
        group from now on."""
        ...

    def release(self, ids: Sequence[int]) -> None:
        """Forget these sequences."""
        ...


@runtime_checkable
class CompilingDrafter(Drafter, Protocol):
    """A drafter whose first trees of a shape take longer than later ones."""

    @property
    def compiled(self) -> bool:
        """Whether kernels were compiled or graphs captured to draft the trees collected last."""
        ...


@runtime_checkable
class DeviceDrafter(Drafter, Protocol):
    """A drafter on the executor's device, whose draft tokens can be verified before the host knows them."""

    @property
    def seconds(self) -> float:
        """How long it took to draft the pending trees collected last."""
        ...

    @property
    def began_ahead(self) -> bool:
        """Whether `draft_ahead` began the trees that are pending."""
        ...

    def pending_trees(self) -> dict[int, TokenTree]:
        """Return the trees that are being drafted, to be verified as a whole and collected afterwards; none
        where they must be collected first. A draft token is negative: -1 - p is at place p of the device."""
        ...

    def draft_ahead(self, requests: Sequence[DraftRequest], verified: Sequence[int]) -> bool:
        """Begin to draft, if the drafter can, chains of the depths of `requests` after what the step launched
        last yields: it verifies for the i-th request a chain of verified[i] draft tokens, as tree i. The next
        `begin` takes them, if it asks for chains after just these tokens. Returns whether kernels were
        compiled or graphs captured, for which the step was kept waiting."""
        ...

    def forget_ahead(self) -> None:
        """Forget what was drafted ahead: the next step has no draft tokens."""
        ...


@runtime_checkable
class RemoteDraft(Drafter, Protocol):
    """A drafter elsewhere, which can read prompts while the target has not computed them."""

    def foresee(self, requests: Sequence[DraftRequest]) -> None:
        """Let it read these prompts, of depth 0, before trees are requested for them."""
        ...
