"""The data of a step, plain enough to cross a socket, and the protocols of executors and drafters.

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
from streamserve.protocol.messages import LikelyToken, PromptLogprob
from streamserve.protocol.sampling import SamplingParams

TARGET = 0
"""The KV cache group of the target model."""

DRAFT = 1
"""The KV cache group of a draft model, if there is one."""

UNKNOWN_TOKEN = 0
"""Placeholder for the token of a span with `follows`: the token is known to the device only."""


@dataclass(frozen=True)
class SequenceState:
    """The sampling state of a sequence. It is sent with the sequence's first step, and again after an edit;
    the executor updates it from its own results. `prompt` and `outputs` are token ids."""

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
    * Logits are computed for every tree node, and for all of `tokens` if `prompt_logprobs` is set; without
      these two, no row has logits.
    * `choices`: the output choices that are sampled at the root. At the end of a fresh prompt these are all
      choices of the request, and the tree has one node: the sequence goes on as the first choice, and the
      others fork from it. Later each sequence has one choice.
    * `follows`: the span's one token is not known to the host yet: the step launched before this one samples
      it.
    * `adapter`: the LoRA adapter of the rows, by the hash of its files; empty: none.
    * `skip`: number of first rows to leave out of the pass, because their KV is in its slots already. Used
      for a draft model's passes over the levels of a tree.
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
    """One step. The executor first forgets the `released` sequences, then takes the states of `admitted`
    ones, performs `copies` of the target's KV (source block, destination block) one after another, and runs
    `spans`.

    At any time until the step has ended it also copies blocks of all KV cache groups to and from the host
    pool: `swap_out` (KV block, host block), then `swap_in` (host block, KV block). No span or other copy
    touches a block that these read or write.
    """

    step: int
    admitted: list[SequenceState]
    released: list[int]
    copies: list[tuple[int, int]]
    spans: list[Span]
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """A sampled token. If requested, its log-probability and the highest log-probabilities are included, both
    from the distribution before processing. `ends`: the token ends the text whatever the parameters say,
    because its grammar is complete."""

    token: int
    logprob: float | None = None
    top: list[LikelyToken] | None = None
    ends: bool = False


class SpanResult(msgspec.Struct, frozen=True, gc=False):
    """The result of one span.

    * `outputs[i]`: the new tokens of `Span.choices[i]`: the accepted path, then one more. When the result is
      returned, the KV of `tokens` and of the accepted path lies in position order from `start` on.
    * `prompt_logprobs[j]`: the log-probabilities of the token at position `start + 1 + j`.
    * `error`: why the sequence cannot go on; its `outputs` are void. Empty: none.
    * `not_finite`: the model's logits were NaN or infinite before any mask. The sequence cannot go on, its
      `outputs` are void, and its KV must not be used.
    * `pooled`: the vector of a request with `pooling`, in its last span, as float32 numbers.
    """

    sequence: int
    outputs: list[list[Sampled]]
    prompt_logprobs: list[PromptLogprob] = []
    error: str = ""
    not_finite: bool = False
    pooled: bytes = b""


@dataclass(frozen=True)
class StepResult:
    """The results of a step.

    * `spans`: an entry for each span, in the plan's order.
    * `seconds`: the step's seconds as the executor knows them; None: the engine's clock measures them.
    * `swap_seconds`: seconds of the swap copies, which run concurrently with the rest.
    * `compiled`: whether kernels were compiled or graphs captured for the step; then its time does not
      predict the time of other steps.
    """

    spans: list[SpanResult]
    seconds: float | None = None
    swap_seconds: float = 0.0
    compiled: bool = False


class Executor(Protocol):
    """Executes steps on tensors (execution/) or on a cost model (simulate/)."""

    def run(self, plan: StepPlan) -> StepResult:
        """Execute one step. Before it returns, the KV of accepted tree nodes is moved into position order."""

    def close(self) -> None:
        """Free the cache and all other resources."""


@runtime_checkable
class AsyncExecutor(Executor, Protocol):
    """An executor that runs steps while the host does other work. Steps run in the order of their launches;
    at most two are launched and not finished at a time."""

    def launch(self, plan: StepPlan) -> None:
        """Begin to execute a step. Its spans may take their tokens from the step launched before
        (Span.follows)."""

    def can_follow(self) -> bool:
        """Return whether a step may be launched that takes its tokens from the step launched last: these are
        chosen on the device, and the host has nothing to add to them in `finish`."""

    def finish(self) -> StepResult:
        """Wait for the earliest launched step that is not finished, and return its results."""


@dataclass(frozen=True)
class DraftRequest:
    """A request for a draft tree after the committed tokens of sequence `id`: the first `length` of `tokens`.

    `tokens` is the sequence's list itself, not a copy: drafters must not modify it, and the engine only
    appends to it. If `epoch` differs from the sequence's earlier requests, tokens, outputs and `params` may
    have changed, and any state derived from earlier requests is void.

    The draft tokens are for outputs number `output`, `output` + 1, … of `choice`, under `params`. A drafter
    that uses the target's sampling noise drafts the tokens that the target is likely to sample. `depth`,
    `width` and `nodes` are the tree's levels, nodes a level, and nodes in all, without the root. With an
    `expansion` each node of level l gets its best `expansion[l]` children, whatever their probabilities.

    With depth 0, a drafter with its own KV only computes the tokens' KV, and answers with a root.

    * `need`: seconds until the next token is due for the target for the time per output token; None without a
      target.
    * `blocks`: the KV blocks, for a drafter with its own KV. Its KV cache group has the KV of the first
      `computed` tokens. The drafter writes the KV of the others, and may use the following slots for `nodes`
      draft tokens.
    * `adapter`: the target's LoRA adapter for the sequence. Only a drafter that is part of the target has it.
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
        """The KV cache group that the drafter uses: TARGET, DRAFT, or None for a drafter without KV."""

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Start drafting for these sequences."""

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        """Return the trees that are ready by `deadline` (on the engine's clock), by sequence id. A sequence
        without a tree is not speculated for in this step. For a sequence with a tree, the drafter's KV cache
        group now has the KV of all committed tokens."""

    def release(self, ids: Sequence[int]) -> None:
        """Forget these sequences."""


@runtime_checkable
class CompilingDrafter(Drafter, Protocol):
    """A drafter that compiles kernels or captures graphs for the first trees of a shape."""

    @property
    def compiled(self) -> bool:
        """Whether kernels were compiled or graphs captured to draft the trees collected last."""


@runtime_checkable
class DeviceDrafter(Drafter, Protocol):
    """A drafter on the executor's device, whose draft tokens can be verified before the host knows them."""

    @property
    def seconds(self) -> float:
        """Seconds that drafting the pending trees collected last took."""

    @property
    def began_ahead(self) -> bool:
        """Whether the pending trees were begun by `draft_ahead`."""

    def pending_trees(self) -> dict[int, TokenTree]:
        """Return the trees that are being drafted, to be verified as a whole and collected afterwards.
        Returns none if they must be collected first. Their draft tokens are negative: -1 - p stands for the
        token at place p of the device."""

    def draft_ahead(self, requests: Sequence[DraftRequest], verified: Sequence[int]) -> bool:
        """Begin to draft chains of the depths of `requests` after the tokens that the step launched last
        yields, if the drafter can. That step verifies, as tree i, a chain of verified[i] draft tokens for the
        i-th request. The next `begin` takes the chains if it requests chains after exactly these tokens.
        Returns whether kernels were compiled or graphs captured, which delayed the step."""

    def forget_ahead(self) -> None:
        """Forget the chains that were drafted ahead, because the next step has no draft tokens."""


@runtime_checkable
class RemoteDraft(Drafter, Protocol):
    """A drafter in another process, which can read prompts before the target has computed them."""

    def foresee(self, requests: Sequence[DraftRequest]) -> None:
        """Let the drafter read the prompts of these requests, of depth 0, before trees are requested for
        them."""
