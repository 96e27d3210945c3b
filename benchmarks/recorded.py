"""A drafter for virtual time that replays recorded draft trees, with their scores and acceptance.

For each position of some texts, a recording contains the shapes of the trees that a draft model grew there,
and which of their nodes matched the target model. The same trees are grown with the simulated model's tokens:
they are accepted where the recorded trees were, with the same scores. Drafting costs passes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamserve.contracts.plan import DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.simulate.executor import CostExecutor, next_token

KINDS = ("1", "2", "3", "4", "specinfer")
"""Shapes of recorded trees: beams of width 1 to 4, and SpecInfer's fixed tree."""

Node = tuple[int, float, bool]
"""A recorded node: its parent, the draft's score for it, and whether it matched the target."""


@dataclass(frozen=True)
class Recording:
    """The recorded trees. `trees[kind][p]` has the nodes after the root at position p, level by level. Text t
    covers the positions from `starts[t]` to `starts[t + 1]`; `families[t]` is its kind of task."""

    trees: dict[str, list[tuple[Node, ...]]]
    starts: tuple[int, ...]
    families: tuple[str, ...]

    def tree(self, text: int, output: int, width: int, expansion: bool) -> tuple[Node, ...]:
        """Return the nodes drafted after the first `output` tokens of a text. Positions beyond its end wrap
        around."""
        text %= len(self.families)
        first, end = self.starts[text], self.starts[text + 1]
        kind = "specinfer" if expansion else str(min(max(width, 1), 4))
        return self.trees[kind][first + output % (end - first)]


def pack(recording: Recording) -> dict[str, npt.NDArray[np.generic]]:
    """Return a recording as arrays for `unpack`. Scores are rounded to 256 steps."""
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "starts": np.array(recording.starts, np.int32),
        "families": np.array(recording.families),
    }
    for kind, trees in recording.trees.items():
        nodes = [node for tree in trees for node in tree]
        arrays[f"size-{kind}"] = np.array([len(tree) for tree in trees], np.uint8)
        arrays[f"parent-{kind}"] = np.array([parent for parent, _, _ in nodes], np.uint8)
        arrays[f"score-{kind}"] = np.array([round(255 * score) for _, score, _ in nodes], np.uint8)
        arrays[f"right-{kind}"] = np.packbits(np.array([matched for _, _, matched in nodes], np.bool_))
    return arrays


def unpack(arrays: "dict[str, npt.NDArray[np.generic]]") -> Recording:
    """Return the recording that `pack` made into these arrays."""
    trees: dict[str, list[tuple[Node, ...]]] = {}
    for kind in KINDS:
        parents = arrays[f"parent-{kind}"].tolist()
        scores = (arrays[f"score-{kind}"].astype(np.float64) / 255).tolist()
        matched = np.unpackbits(arrays[f"right-{kind}"].astype(np.uint8)).astype(np.bool_).tolist()
        nodes = list(zip(parents, scores, matched, strict=False))
        ends = np.cumsum(arrays[f"size-{kind}"].astype(np.int64)).tolist()
        trees[kind] = [tuple(nodes[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    return Recording(trees, tuple(arrays["starts"].tolist()), tuple(arrays["families"].tolist()))


class RecordedDrafter:
    """Implements contracts.plan.Drafter with a CostExecutor, whose clock its passes advance. A request's seed
    selects the recorded text. `cost` returns the seconds of a draft pass, given its number of query
    tokens."""

    group = None

    def __init__(self, recording: Recording, executor: CostExecutor, cost: Callable[[int], float]) -> None:
        self._recording = recording
        self._executor = executor
        self._cost = cost
        self._trees: dict[int, TokenTree] = {}

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Draft at once: one pass per level, over the nodes of this level of all trees."""
        self._trees = {request.id: self._draft(request) for request in requests}
        for level in range(max((request.depth for request in requests), default=0)):
            query_tokens = sum(
                1 if level == 0 else request.width for request in requests if request.depth > level
            )
            self._executor.seconds += self._cost(query_tokens)

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        trees, self._trees = self._trees, {}
        return trees

    def release(self, ids: Sequence[int]) -> None:
        pass

    def _draft(self, request: DraftRequest) -> TokenTree:
        tokens = request.tokens[: request.length]
        recorded = self._recording.tree(
            request.params.seed or 0, request.output, request.width, bool(request.expansion)
        )
        tree_tokens, parents, scores, accept, depths = [tokens[-1]], [-1], [1.0], [1.0], [0]
        children = [0]
        context = np.array(tokens, np.int64)
        target_tokens: list[int] = []  # the simulated model's next tokens, extended when needed
        for parent, score, matched in recorded[: request.nodes]:
            depth = depths[parent] + 1
            if depth > request.depth:
                break
            while len(target_tokens) < depth:
                extended_context = np.append(context, np.array(target_tokens, np.int64))
                target_tokens.append(
                    next_token(extended_context, request.params, request.choice, self._executor.vocab_size)
                )
            children[parent] += 1
            other_token = (target_tokens[depth - 1] + children[parent]) % self._executor.vocab_size
            tree_tokens.append(target_tokens[depth - 1] if matched else other_token)
            parents.append(parent)
            scores.append(score)
            accept.append(accept[parent] * score)
            depths.append(depth)
            children.append(0)
        return TokenTree(tuple(tree_tokens), tuple(parents), tuple(scores), tuple(accept))
