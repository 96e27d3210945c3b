"""What a step is made of, as plain data that could cross a socket, and who carries it out, as protocols.

plan      the engine ranks its sequences and makes room            (engine/scheduler.py)
begin     the drafter starts guessing, collect returns its trees   (Drafter)
select    tree nodes and chunk sizes are fixed by the budget       (engine/scheduler.py)
run       copies, forward pass, sampling, compaction               (Executor)
commit    state moves, events come out                             (engine/scheduler.py)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from streamserve.protocol.messages import PromptLogprob, TopLogprob
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.tree import TokenTree

TARGET = 0
"""The plane of the target model's KV."""

DRAFT = 1
"""The plane of a draft model's KV, where there is one."""


@dataclass(frozen=True)
class SequenceState:
    """What sampling must know of a sequence: sent when it first joins a step (or was edited since), then
    kept up to date by the executor from its own results. `prompt` and `outputs` are token ids."""

    sequence: int
    choice: int
    params: SamplingParams
    prompt: list[int]
    outputs: list[int]


class Span(msgspec.Struct, frozen=True):
    """Query tokens of one sequence in one step.

    `tokens` are committed tokens at positions `start`, `start` + 1, …, whose KV this step computes in
    `plane`. A span that reaches the sequence's last committed token has a `tree` whose root is that token
    (`tokens[-1]`); the tree's other nodes are query rows too, at position `start + len(tokens) - 1 + depth`.
    Rows, in order: `tokens`, then tree nodes 1, 2, …, whose KV goes to the slots right behind, in node order.

    `blocks` is the block table for positions 0 to `start + rows - 1`.
    Logits: none without a tree; for every tree node with one; for all of `tokens` if `prompt_logprobs`.
    `choices`: the output choices sampled at the root: the sequence's own, or at the end of a fresh
    prompt all of the request's (they fork from it; such a tree has one node). The sequence goes on as the
    first of them, the others as sequences of their own.

    The first `skip` rows are left out of a pass: their KV is in its slots already. (A draft's pass over a
    tree's last level.)
    """

    sequence: int
    start: int
    tokens: list[int]
    blocks: list[int]
    tree: TokenTree | None = None
    choices: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    plane: int = TARGET
    skip: int = 0

    @property
    def rows(self) -> int:
        """Number of query tokens, skipped ones too."""
        return len(self.tokens) + (0 if self.tree is None else len(self.tree.tokens) - 1)


@dataclass(frozen=True)
class StepPlan:
    """One step. The executor does things in this order: forget `released` sequences, take `admitted` ones,
    perform `copies` (source block, destination block; one after another, of the target's KV), run `spans`.

    Beside all that, at any time until the step is over, it copies blocks of all planes to and from the host
    pool: `swap_out` (KV block, host block) and then `swap_in` (host block, KV block). No span or copy touches
    a block that these read or write."""

    step: int
    admitted: list[SequenceState]
    released: list[int]
    copies: list[tuple[int, int]]
    spans: list[Span]
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)


class Sampled(msgspec.Struct, frozen=True):
    """A chosen token, with log-probabilities under the unprocessed distribution if the request asked.
    `ends`: it ends the text whatever the parameters say, as its grammar has no more."""

    token: int
    logprob: float | None = None
    top: list[TopLogprob] | None = None
    ends: bool = False


class SpanResult(msgspec.Struct, frozen=True):
    """What a span with a tree, or with prompt log-probabilities, came to.

    `outputs[i]` are the new tokens of `Span.choices[i]`: the accepted path's, then one more. When this is
    returned, the KV of `tokens` and of the accepted path lies in position order behind `start`.
    `prompt_logprobs[j]` is for the token at position `start + 1 + j`. With an `error` the outputs mean
    nothing, and the sequence cannot go on; so it is where the model's own numbers were `not_finite` (NaN or
    infinite, before any mask), and then its KV is not to be trusted either.
    """

    sequence: int
    outputs: list[list[Sampled]]
    prompt_logprobs: list[PromptLogprob] = []
    error: str = ""
    not_finite: bool = False


@dataclass(frozen=True)
class StepResult:
    """One entry a span, in the plan's order. `seconds`: how long it took, where no clock shows it. The swap
    copies took `swap_seconds`, beside the rest."""

    spans: list[SpanResult]
    seconds: float | None = None
    swap_seconds: float = 0.0


class Executor(Protocol):
    """Carries out steps on tensors (execution/) or on a cost model (simulate/)."""

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out one step. Nobody else ever sees a cache that is not linear."""
        ...

    def close(self) -> None:
        """Free the cache and everything else."""
        ...


@dataclass(frozen=True)
class DraftRequest:
    """Ask for a tree behind a sequence's committed tokens: of what the drafter knows of sequence `id`, the
    first `keep` tokens still hold, then come `new_tokens`. A changed `epoch` says that `keep` may be
    shorter than before.

    Guesses are for output number `output` and the following ones of `choice`, sampled as `params` say: who
    guesses under the target's own noise guesses what the target will sample. `depth`, `width` and `nodes` are
    the tree's shape: levels, nodes a level, nodes in all, the root not counted. With an `expansion` each node
    of level l gets its best `expansion[l]` children, whatever their chances.

    Of depth 0 it asks a drafter with KV of its own only to read the tokens, and is answered with a root.

    A drafter with KV of its own finds that of the first `computed` tokens in its plane of `blocks`, writes
    that of the others, and may use the slots behind them for `nodes` guesses.
    """

    id: int
    epoch: int
    keep: int
    new_tokens: list[int]
    choice: int
    output: int
    params: SamplingParams
    depth: int
    width: int
    nodes: int
    computed: int
    blocks: list[int]
    expansion: tuple[int, ...] = ()


class Drafter(Protocol):
    """Guesses tokens: a small model, n-gram lookup, early layers, or a service elsewhere."""

    @property
    def plane(self) -> int | None:
        """The KV plane that the blocks of a request hold for it: the target's, one of its own, or none."""
        ...

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Start guessing for these sequences."""
        ...

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        """The trees that are there by `deadline` (the engine's clock); a missing one means no speculation.
        Whoever gets a tree has KV for all its committed tokens in the drafter's plane from now on."""
        ...

    def release(self, ids: Sequence[int]) -> None:
        """Forget these sequences."""
        ...
