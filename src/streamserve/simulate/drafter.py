"""A simulated draft model without tensors. It has a KV cache group that is managed like the target's.

As in CostExecutor, each slot of its group holds the token that was written there. The drafter reads the KV
that counts as computed back through the block table, and raises if it differs from what was written. So a
block that was trimmed, shared, swapped or moved without its draft KV is detected at once. A sequence whose
tokens change within an epoch is detected, too.

With the group TARGET it is like a draft model of the target's first layers, which writes its draft tokens to
the target's own slots while a step is planned, before the step copies blocks.
"""

import random
from collections.abc import Callable, Sequence

import numpy as np

from streamserve.contracts.plan import DRAFT, TARGET, DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.simulate.executor import CostExecutor, Tokens, next_token, shift_of


class SimulatedDrafter:
    """Implements contracts.plan.Drafter with KV in a `group` of `executor`, whose clock its passes advance.

    A draft token equals the target's next token with probability `accuracy`. A tree is late with probability
    `late`; then neither the tree nor its KV counts. `cost` returns the seconds of a draft pass, given its
    number of query tokens.
    """

    def __init__(
        self,
        executor: CostExecutor,
        accuracy: float = 0.7,
        late: float = 0.0,
        cost: Callable[[int], float] = lambda query_tokens: 0.001,
        seed: int = 0,
        group: int = DRAFT,
    ) -> None:
        self.group = group
        self._executor = executor
        self._accuracy = accuracy
        self._late = late
        self._cost = cost
        self._random = random.Random(seed)
        self._seen: dict[int, tuple[int, list[int]]] = {}
        self._trees: dict[int, TokenTree] = {}
        self.trees = 0
        """Number of trees that arrived in time."""

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Read unread tokens and draft, one pass per level. Raises RuntimeError if KV that counts as computed
        is missing, or if tokens of a known epoch have changed; IndexError if the block table has too few
        slots."""
        self._trees = {request.id: self._draft(request) for request in requests}
        self._executor.seconds += self._cost(sum(request.length - request.computed for request in requests))
        for level in range(1, max((request.depth for request in requests), default=0)):
            self._executor.seconds += self._cost(
                sum(request.width for request in requests if request.depth > level)
            )

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        trees, self._trees = self._trees, {}
        arrived = {id: tree for id, tree in trees.items() if self._random.random() >= self._late}
        self.trees += len(arrived)
        return arrived

    def release(self, ids: Sequence[int]) -> None:
        for id in ids:
            self._seen.pop(id, None)

    def _draft(self, request: DraftRequest) -> TokenTree:
        tokens = request.tokens[: request.length]
        epoch, seen = self._seen.get(request.id, (request.epoch, []))
        if epoch == request.epoch and tokens[: len(seen)] != seen[: len(tokens)]:
            raise RuntimeError(f"the tokens of sequence {request.id} changed within an epoch")
        self._seen[request.id] = request.epoch, tokens
        cached = self._executor.read(self.group, request.blocks, request.computed)
        # The target's copies are still to come: without one, a draft of the target's layers is only worse.
        if self.group != TARGET and cached.tolist() != tokens[: request.computed]:
            raise RuntimeError(f"the draft KV of sequence {request.id} is not the KV of its tokens")
        tree = self._grow(request, tokens)
        start = min(request.computed, len(tokens) - 1)
        self._executor.write(self.group, request.blocks, start, tokens[start:] + list(tree.tokens[1:]))
        return tree

    def _grow(self, request: DraftRequest, tokens: list[int]) -> TokenTree:
        """Grow a tree level by level. The first child on the correct path is correct with probability
        `accuracy`."""
        vocabulary = self._executor.vocab_size
        tree_tokens, parents, depths = [tokens[-1]], [-1], [0]
        level, target_tokens, correct_node = [0], list(tokens), 0
        for depth in range(1, request.depth + 1):
            if correct_node in level:
                context = _array(target_tokens) + shift_of(request.adapter)
                target_tokens.append(next_token(context, request.params, request.choice, vocabulary))
            children = request.expansion[depth - 1] if request.expansion else request.width
            next_level: list[int] = []
            parent_on_path, correct_node = correct_node, -1
            for parent in level:
                correct = parent == parent_on_path and self._random.random() < self._accuracy
                for rank in range(children):
                    if len(tree_tokens) > request.nodes or len(next_level) >= request.width:
                        break
                    offset = rank if correct else rank + 1
                    base = (
                        target_tokens[len(tokens) + depth - 1]
                        if parent == parent_on_path
                        else tree_tokens[parent]
                    )
                    if correct and rank == 0:
                        correct_node = len(tree_tokens)
                    next_level.append(len(tree_tokens))
                    tree_tokens.append((base + offset) % vocabulary)
                    parents.append(parent)
                    depths.append(depth)
            level = next_level
        accept = tuple(0.8**depth for depth in depths)
        scores = (1.0, *(0.8,) * (len(tree_tokens) - 1))
        return TokenTree(tuple(tree_tokens), tuple(parents), scores, accept)


def _array(tokens: list[int]) -> Tokens:
    return np.array(tokens, np.int64)
