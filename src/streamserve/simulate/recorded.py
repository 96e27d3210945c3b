"""A drafter for virtual time that plays what a real one did: its trees, scores and hits.

A recording has, for every position of some texts, the trees that a draft model grew there, by their shape,
and which of their nodes the target model then said. Here the same trees are grown with the pretended model's
tokens: where the draft was right, so it is here, and with the same scores. Drafting costs passes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamserve.engine.plan import DraftRequest
from streamserve.simulate.executor import CostExecutor, next_token
from streamserve.speculation.tree import TokenTree

KINDS = ("1", "2", "3", "4", "specinfer")
"""Shapes that are recorded: beams of such widths, and the fixed tree."""

Node = tuple[int, float, bool]
"""Of a recorded node: its parent, the draft's score for it, and whether the target said so."""


@dataclass(frozen=True)
class Recording:
    """`trees[kind][p]` are the nodes behind the root, level by level, at position p; the positions of text
    t are `starts[t]` to `starts[t + 1]`, and `families[t]` tells what kind of task it is."""

    trees: dict[str, list[tuple[Node, ...]]]
    starts: tuple[int, ...]
    families: tuple[str, ...]

    def tree(self, text: int, output: int, width: int, expansion: bool) -> tuple[Node, ...]:
        """What was drafted behind the first `output` tokens of a text; who goes on longer begins anew."""
        text %= len(self.families)
        first, end = self.starts[text], self.starts[text + 1]
        kind = "specinfer" if expansion else str(min(max(width, 1), 4))
        return self.trees[kind][first + output % (end - first)]


def pack(recording: Recording) -> dict[str, npt.NDArray[np.generic]]:
    """As arrays, scores in 256 steps: what `unpack` reads."""
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "starts": np.array(recording.starts, np.int32),
        "families": np.array(recording.families),
    }
    for kind, trees in recording.trees.items():
        nodes = [node for tree in trees for node in tree]
        arrays[f"size-{kind}"] = np.array([len(tree) for tree in trees], np.uint8)
        arrays[f"parent-{kind}"] = np.array([parent for parent, _, _ in nodes], np.uint8)
        arrays[f"score-{kind}"] = np.array([round(255 * score) for _, score, _ in nodes], np.uint8)
        arrays[f"right-{kind}"] = np.packbits(np.array([right for _, _, right in nodes], np.bool_))
    return arrays


def unpack(arrays: "dict[str, npt.NDArray[np.generic]]") -> Recording:
    """A recording from its arrays."""
    trees: dict[str, list[tuple[Node, ...]]] = {}
    for kind in KINDS:
        parents = arrays[f"parent-{kind}"].tolist()
        scores = (arrays[f"score-{kind}"].astype(np.float64) / 255).tolist()
        right = np.unpackbits(arrays[f"right-{kind}"].astype(np.uint8)).astype(np.bool_).tolist()
        nodes = list(zip(parents, scores, right, strict=False))
        ends = np.cumsum(arrays[f"size-{kind}"].astype(np.int64)).tolist()
        trees[kind] = [tuple(nodes[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    return Recording(trees, tuple(arrays["starts"].tolist()), tuple(arrays["families"].tolist()))


class RecordedDrafter:
    """engine.plan.Drafter beside a CostExecutor, whose clock its passes move on. A request's seed says which
    of the recorded texts it plays. `cost` is the seconds of a draft pass with so many rows."""

    plane = None

    def __init__(self, recording: Recording, executor: CostExecutor, cost: Callable[[int], float]) -> None:
        self._recording = recording
        self._executor = executor
        self._cost = cost
        self._tokens: dict[int, list[int]] = {}
        self._trees: dict[int, TokenTree] = {}

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Draft at once: a pass a level, over the nodes of that level of all trees."""
        self._trees = {request.id: self._draft(request) for request in requests}
        for level in range(max((request.depth for request in requests), default=0)):
            rows = sum(1 if level == 0 else one.width for one in requests if one.depth > level)
            self._executor.seconds += self._cost(rows)

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        trees, self._trees = self._trees, {}
        return trees

    def release(self, ids: Sequence[int]) -> None:
        for id in ids:
            self._tokens.pop(id, None)

    def _draft(self, request: DraftRequest) -> TokenTree:
        tokens = self._tokens.setdefault(request.id, [])
        del tokens[request.keep :]
        tokens += request.new_tokens
        recorded = self._recording.tree(
            request.params.seed or 0, request.output, request.width, bool(request.expansion)
        )
        names, parents, scores, accept, depths = [tokens[-1]], [-1], [1.0], [1.0], [0]
        children = [0]
        context = np.array(tokens, np.int64)
        truth: list[int] = []  # what the pretended model says next, as far as anybody asked
        for parent, score, right in recorded[: request.nodes]:
            depth = depths[parent] + 1
            if depth > request.depth:
                break
            while len(truth) < depth:
                here = np.append(context, np.array(truth, np.int64))
                truth.append(next_token(here, request.params, request.choice, self._executor.vocab_size))
            children[parent] += 1
            wrong = (truth[depth - 1] + children[parent]) % self._executor.vocab_size
            names.append(truth[depth - 1] if right else wrong)
            parents.append(parent)
            scores.append(score)
            accept.append(accept[parent] * score)
            depths.append(depth)
            children.append(0)
        return TokenTree(tuple(names), tuple(parents), tuple(scores), tuple(accept))
