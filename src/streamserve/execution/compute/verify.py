"""Verify token trees when draft and target share their noise: follow the tokens that the target samples.

The target's tokens are a function of its logits and of the noise for each output index. The walk begins at
the root, samples the target's token, and goes on to the child with this token, whose logits are then valid.
It ends where there is no such child. The tokens equal plain decoding, for every tree and drafter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from streamserve.contracts.tree import TokenTree


@dataclass
class Walk:
    """A walk down `tree`. `path` has the nodes reached so far, the root first. `tokens[i]` is the token
    sampled at `path[i]`; at the end these are the accepted draft tokens and one more token."""

    tree: TokenTree
    path: list[int] = field(default_factory=lambda: [0])
    tokens: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether a token was sampled at every node of the path."""
        return len(self.tokens) == len(self.path)


def verify(walks: Sequence[Walk], sample: Callable[[list[int]], list[int]]) -> None:
    """Complete `walks`. `sample(numbers)` returns, for each of these walks, the target's token at the path's
    last node, given the walk's `tokens` so far."""
    active = list(range(len(walks)))
    while active:
        for number, token in zip(active, sample(active), strict=True):
            walk = walks[number]
            walk.tokens.append(token)
            child = walk.tree.child(walk.path[-1], token)
            if child is not None:
                walk.path.append(child)
        active = [number for number in active if not walks[number].done]
