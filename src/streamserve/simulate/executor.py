"""An executor without tensors: a step's time comes from a cost curve, its tokens from the KV in its blocks.

Each KV slot holds the token that was written there. The next token is a hash of everything to which the block
table refers, so it is wrong as soon as a block is stale, foreign, or was copied too late. So the simulation
is not only a clock, but also a strict test of scheduling and block management. Swapped blocks are tested in
the same way: they are copied during the step, as late as allowed.
"""

from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from streamserve.contracts.cost import DEFAULT_SWAP_COST, SwapCost
from streamserve.contracts.plan import TARGET, Sampled, SequenceState, Span, SpanResult, StepPlan, StepResult
from streamserve.protocol.messages import LikelyToken, PromptLogprob
from streamserve.protocol.sampling import SamplingParams

Cost = Callable[[int, int], float]
"""Seconds of a step, from its query tokens and the KV tokens they attend to."""

Tokens = npt.NDArray[np.int64]


def shift_of(adapter: str) -> int:
    """Return the value that is added to the tokens in the KV that a LoRA adapter computes, so that this KV is
    wrong for other requests; 0 without an adapter."""
    digest = blake2b(adapter.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") << 24 if adapter else 0


def next_token(context: Tokens, params: SamplingParams, choice: int, vocab_size: int) -> int:
    """Return the simulated model's next token. Greedy text depends only on the context; sampled text depends
    on seed and choice, too."""
    noise = b"" if params.greedy else f"{params.seed}/{choice}".encode()
    digest = blake2b(context.tobytes() + noise, digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


class CostExecutor:
    """Runs plans on an array of token ids. `seconds` is their cost since it was last set to 0."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        cost: Cost,
        groups: int = 1,
        swap_blocks: int = 0,
        swap_cost: SwapCost = DEFAULT_SWAP_COST,
    ) -> None:
        self.groups = groups
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.cost = cost
        self.seconds = 0.0
        self.accepted = 0
        self.states: dict[int, SequenceState] = {}
        self.swap_cost = swap_cost
        self._kv: Tokens = np.full((groups, num_blocks, block_size), -1, np.int64)
        self._host: Tokens = np.full((groups, swap_blocks, block_size), -1, np.int64)

    def receive(self, source: "CostExecutor", copies: list[tuple[int, int]]) -> None:
        """Copy blocks with their present contents. `copies` are pairs: a block of `source`, and a block of
        this executor."""
        for source_block, target_block in copies:
            self._kv[:, target_block] = source._kv[:, source_block]

    def run(self, plan: StepPlan) -> StepResult:
        for sequence in plan.released:
            del self.states[sequence]
        for state in plan.admitted:
            self.states[state.sequence] = state
        for source, target in plan.copies:
            self._kv[TARGET, target] = self._kv[TARGET, source]
        before = self._kv[:, [source for source, _ in plan.swap_out]]
        results = [self._span(span) for span in plan.spans]
        self._swap(plan, before)
        query_tokens = sum(span.query_tokens for span in plan.spans)
        context = sum(span.start + span.query_tokens for span in plan.spans)
        swapping = self.swap_cost.out(len(plan.swap_out)) + self.swap_cost.back(len(plan.swap_in))
        seconds = max(self.cost(query_tokens, context), swapping)
        self.seconds += seconds
        return StepResult(results, seconds, swapping)

    def close(self) -> None:
        self.states.clear()

    def _swap(self, plan: StepPlan, before: Tokens) -> None:
        """Swap blocks at the end of the step, the latest time allowed. So if swapped-in blocks are read too
        early, they are empty."""
        if not np.array_equal(before, self._kv[:, [source for source, _ in plan.swap_out]]):
            raise RuntimeError("a block was written while it was copied out")
        for source, host in plan.swap_out:
            self._host[:, host] = self._kv[:, source]
        for host, target in plan.swap_in:
            self._kv[:, target] = self._host[:, host]
            self._host[:, host] = -1

    def _span(self, span: Span) -> SpanResult:
        shift = shift_of(span.adapter)
        self.write(span.group, span.blocks, span.start, [token + shift for token in span.tokens])
        if span.tree is None:
            return SpanResult(span.sequence, [], self._prompt_logprobs(span))
        end = span.start + len(span.tokens)
        context = self.read(TARGET, span.blocks, end)
        if self.states[span.sequence].params.pooling:
            return SpanResult(span.sequence, [], pooled=context.astype("<f4").tobytes())
        outputs = [self._walk(span, context, choice) for choice in span.choices]
        self.write(span.group, span.blocks, end, [token + shift for token in outputs[0][:-1]])
        self.accepted += len(outputs[0]) - 1
        sampled = [[Sampled(token, 0.0) for token in tokens] for tokens in outputs]
        return SpanResult(span.sequence, sampled, self._prompt_logprobs(span))

    def _walk(self, span: Span, context: Tokens, choice: int) -> list[int]:
        """Descend the tree while its draft tokens are the model's tokens. Return these tokens, and one
        more."""
        assert span.tree is not None
        params = self.states[span.sequence].params
        node: int | None = 0
        tokens: list[int] = []
        while node is not None:
            extended_context = np.append(context, np.array(tokens, np.int64) + shift_of(span.adapter))
            tokens.append(next_token(extended_context, params, choice, self.vocab_size))
            node = span.tree.child(node, tokens[-1])
        return tokens

    def _prompt_logprobs(self, span: Span) -> list[PromptLogprob]:
        if span.prompt_logprobs is None:
            return []
        following = self.states[span.sequence].prompt[span.start + 1 : span.start + len(span.tokens) + 1]
        return [PromptLogprob(token, 0.0, 1, [LikelyToken(token, 0.0)]) for token in following]

    def read(self, group: int, blocks: list[int], length: int) -> Tokens:
        """Return the tokens of a KV cache group at the first `length` positions of a block table."""
        tokens: Tokens = self._kv[(group, *self._slots(blocks, 0, length))]
        return tokens

    def write(self, group: int, blocks: list[int], start: int, tokens: list[int]) -> None:
        """Write tokens from position `start` of a block table on. Raises IndexError beyond its end."""
        self._kv[(group, *self._slots(blocks, start, start + len(tokens)))] = tokens

    def _slots(self, blocks: list[int], first: int, last: int) -> tuple[Tokens, Tokens]:
        positions = np.arange(first, last)
        return np.array(blocks, np.int64)[positions // self.block_size], positions % self.block_size
