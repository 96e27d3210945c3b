"""Verify token trees when draft and target share their noise: follow the tokens that the target samples.

What the target emits is a function of its logits and of the noise for each output index. So from the root,
sample the target's token; while a child has this token, go to that child, whose row of logits is then the
right one. The tokens are those that plain decoding would emit, for every tree and every drafter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from streamserve.contracts.tree import TokenTree


@dataclass
class Walk:
    """A path down `tree`. `path` are the nodes reached, the root first. When it is done, `tokens[i]` is the
    token sampled at `path[i]`: the accepted draft tokens, then one more token."""

    tree: TokenTree
    path: list[int] = field(default_factory=lambda: [0])
    tokens: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether a token was sampled at every node reached."""
        return len(self.tokens) == len(self.path)


def verify(walks: Sequence[Walk], sample: Callable[[list[int]], list[int]]) -> None:
    """Complete `walks`. `sample(numbers)` returns the target's token at the last node of each of these walks,
    where the tokens before it are the walk's `tokens` so far."""
    active = list(range(len(walks)))
    while active:
        for number, token in zip(active, sample(active), strict=True):
            walk = walks[number]
            walk.tokens.append(token)
            child = walk.tree.child(walk.path[-1], token)
            if child is not None:
                walk.path.append(child)
        active = [number for number in active if not walks[number].done]
