"""Token trees: draft tokens with their parents. A chain is a tree; a request without draft tokens has one
node.

tokens   7 ─┬─ 3 ─── 9        node     0  1  2  3
            └─ 4              tokens   7  3  4  9
(node 0 is the root:          parents -1  0  0  1
 the last committed token)    depth    0  1  1  2
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

NO_DRAWS: Mapping[int, NDArray[np.float32]] = {}


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Draft tokens in an order where parents precede their children. Node 0 is the root, with parent -1.

    * `scores`: the drafter's own scores.
    * `accept`: the calibrated probability that the whole path to a node is accepted. It is 1 for the root,
      and never above the parent's.
    * `draws[node]`: where draft tokens were sampled, the distribution [vocabulary] that the children of
      `node` were drawn from, independently, in their order.

    Check trees from outside the process with `check`. A step has too many trees to check all of its trees.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    accept: tuple[float, ...]
    draws: Mapping[int, NDArray[np.float32]] = field(default_factory=lambda: NO_DRAWS, compare=False)

    def check(self) -> "TokenTree":
        """Return the tree itself. Raises ValueError if the arrays do not form one."""
        size = len(self.tokens)
        if not size or not size == len(self.parents) == len(self.scores) == len(self.accept):
            raise ValueError("a token tree needs at least its root, and arrays of one length")
        if self.parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(self.parents) if i):
            raise ValueError(f"parents {self.parents} do not precede their children")
        if any(self.accept[i] > self.accept[p] for i, p in enumerate(self.parents) if i):
            raise ValueError("a node cannot be more likely accepted than its parent")
        return self

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> list[int]:
        """Return the distance of each node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """Return the node numbers from the root to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` with the draft token `token`; None if there is none."""
        for other in range(node + 1, len(self.tokens)):
            if self.parents[other] == node and self.tokens[other] == token:
                return other
        return None

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Return the path of nodes that `tokens` follow from the root, root included. It ends at the first
        token that was not drafted."""
        path, left = [0], iter(tokens)
        token = next(left, None)
        for node in range(1, len(self.tokens)):  # children come after their parents
            if self.parents[node] == path[-1] and self.tokens[node] == token:
                path.append(node)
                token = next(left, None)
        return path

    def keep(self, nodes: Sequence[int]) -> "TokenTree":
        """Return the subtree of `nodes`. They must be ascending, contain the root, and contain every node's
        parent."""
        if len(nodes) == len(self.tokens):
            return self
        index = {node: i for i, node in enumerate(nodes)}
        parents = (-1, *(index[self.parents[node]] for node in nodes[1:]))
        return TokenTree(
            tuple(self.tokens[node] for node in nodes),
            parents,
            tuple(self.scores[node] for node in nodes),
            tuple(self.accept[node] for node in nodes),
            {index[node]: self.draws[node] for node in nodes if node in self.draws},
        )


def likeliest(tree: TokenTree) -> Iterator[int]:
    """Return all nodes but the root, by falling acceptance. A parent always precedes its children: it is at
    least as likely, and ties are in node order."""
    return iter(sorted(range(1, len(tree)), key=lambda node: (-tree.accept[node], node)))


@lru_cache(maxsize=1 << 10)
def root(token: int) -> TokenTree:
    """Return the tree without draft tokens, whose root is the last committed token."""
    return TokenTree((token,), (-1,), (0.0,), (1.0,))


def chain(tokens: Sequence[int], accept: Sequence[float] | None = None) -> TokenTree:
    """Return a chain: `tokens[0]` is the root, each further token the only child of the preceding one."""
    size = len(tokens)
    return TokenTree(tuple(tokens), tuple(range(-1, size - 1)), (0.0,) * size, tuple(accept or (1.0,) * size))
