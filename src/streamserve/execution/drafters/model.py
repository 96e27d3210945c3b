"""Draft with a model: a draft model with separate KV, or the target's first layers on the target's KV.

pass 0   reads the unread tokens of every request, at least the last one; its logits give level 1 of the trees
pass l   reads level l of all trees; its logits give level l + 1

A pass computes only the rows of its level: the slots after the committed tokens have the levels above in node
order, as in verification. The KV of draft tokens is not retained. Accepted tokens are read again in pass 0 of
the next request, which costs a small model little.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamserve.contracts.plan import TARGET, DraftRequest, Span
from streamserve.contracts.tree import TokenTree, chain
from streamserve.execution.compute.draft_selection import (
    DraftSelector,
    ScoredToken,
    sample_draft_tokens,
    select_draft_tokens,
)
from streamserve.execution.compute.grammar import Grammars
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.compute.passes import Passes
from streamserve.execution.compute.sampling import Scores, finite_rows
from streamserve.execution.drafters.ahead import Ahead, ChainPart, parts_of
from streamserve.execution.drafters.chains import ChainDrafting, ChainsInFlight
from streamserve.execution.drafters.path_state import PathState, PathStates
from streamserve.execution.model.layout import lay_out

MAX_QUERY_TOKENS = 1024
"""Maximum tokens of one pass over unread text."""
MIN_PATH_PROBABILITY = 0.02
"""Paths with a lower probability under the draft model are not extended."""


@dataclass
class _TreeBuilder:
    """A tree under construction. `level` has the nodes whose children are drafted next."""

    request: DraftRequest
    tokens: list[int]
    state: PathState | None = None
    parents: list[int] = field(default_factory=lambda: [-1])
    scores: list[float] = field(default_factory=lambda: [1.0])
    accept: list[float] = field(default_factory=lambda: [1.0])
    level: list[int] = field(default_factory=lambda: [0])
    depth: int = 0
    draws: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    finite: bool = True
    """Whether the hidden states of the committed tokens, and so their KV, are finite."""
    whole: bool = False
    """Whether unlikely paths are extended too."""

    @property
    def unfinished(self) -> bool:
        full = len(self.tokens) > self.request.nodes
        return self.finite and bool(self.level) and self.depth < self.request.depth and not full

    def path_to(self, node: int) -> list[int]:
        """Return the draft tokens on the path to `node`, without the root."""
        path: list[int] = []
        while node:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def tree(self) -> TokenTree:
        return TokenTree(
            tuple(self.tokens), tuple(self.parents), tuple(self.scores), tuple(self.accept), self.draws
        )

    def grow(self, drafted: Sequence[Sequence[ScoredToken]]) -> None:
        """Add the likeliest children of the level's nodes as the next level. `drafted` has the draft tokens
        of each node."""
        expansion = self.request.expansion
        children_per_node = expansion[self.depth] if expansion else self.request.width
        candidates = [
            (self.accept[node] * feature, rank, node, token, feature)
            for node, children in zip(self.level, drafted, strict=True)
            for rank, (token, feature) in enumerate(children[:children_per_node])
        ]
        if not (expansion or self.whole):
            candidates = [candidate for candidate in candidates if candidate[0] >= MIN_PATH_PROBABILITY]
        candidates.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))
        free_nodes = min(self.request.width, self.request.nodes + 1 - len(self.tokens))
        # Children of one parent stay in order of rank: statistics take the first child as the best.
        self.level = []
        for path, _, parent, token, feature in candidates[:free_nodes]:
            self.level.append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(parent)
            self.scores.append(feature)
            self.accept.append(min(path, self.accept[parent]))
        self.depth += 1


@dataclass
class _PendingChains:
    """Chains that are being drafted, and the `parts` of `trees` in them. `whole`: a launched step verifies
    them as a whole already, so that no token may be left out."""

    chains: ChainsInFlight
    trees: Sequence[_TreeBuilder]
    parts: Sequence[ChainPart]
    whole: bool = False

    def placed_trees(self) -> dict[int, TokenTree]:
        """Return the trees with the place of each draft token instead of the token, as -1 - place."""
        pairs = zip(self.trees, self.parts, strict=True)
        return {tree.request.id: chain(self._places(part, tree)) for tree, part in pairs}

    def _places(self, part: ChainPart, tree: _TreeBuilder) -> list[int]:
        levels = range(min(part.levels, _chain_length(tree)))
        return [tree.tokens[0], *(-1 - self.chains.place(part.number, level) for level in levels)]


class ModelDrafter:
    """A drafter (contracts.plan.Drafter) with the `passes` of a model. Its KV is in `cache`, which is the KV
    cache group `group` of the blocks."""

    def __init__(
        self,
        passes: Passes,
        cache: KVCache,
        group: int,
        rejection_sampling: bool = False,
        eos_token_ids: Sequence[int] = (),
        grammars: Grammars | None = None,
        selector: DraftSelector = select_draft_tokens,
        chains: ChainDrafting | None = None,
    ) -> None:
        """`rejection_sampling`: draft tokens of sampled requests are drawn at random, for verification by
        rejection. `eos_token_ids`: the target's ids of tokens that end a text. Without `grammars`, drafting
        ignores the requests' grammars. `chains`: drafts greedy trees of one token a level on the device, if
        possible."""
        self.group = group
        self._rejection_sampling = rejection_sampling
        self._states = PathStates(eos_token_ids, grammars)
        self._selector = selector
        self._passes = passes
        self.chains = chains
        self.chains_drafted = 0
        self.compiled = False
        self.cache = cache
        self._trees: dict[int, TokenTree] = {}
        self._pending: _PendingChains | None = None
        self._ahead: Ahead | None = None
        self.seconds = 0.0
        self.began_ahead = False
        self.followed = 0
        """Number of rounds whose chains were drafted ahead and used."""

    @property
    def firsts(self) -> int:
        """Number of passes that compiled kernels or captured a graph, or are about to."""
        return self._passes.firsts

    @torch.inference_mode()
    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Draft trees for `requests`. Chains on a device are only launched; `collect` waits for them."""
        firsts, ahead, self._ahead = self._passes.firsts, self._ahead, None
        self.began_ahead = False
        trees = [self._start(request) for request in requests]
        longest = max(map(_chain_length, trees), default=0)
        if self.chains and self.chains.fits(len(trees), longest) and all(map(_is_greedy_chain, trees)):
            if ahead and (parts := ahead.parts_of(requests, self.cache.block_size)):
                self._pending, self.compiled = _PendingChains(ahead.chains, trees, parts), ahead.compiled
                self.followed, self.began_ahead = self.followed + 1, True
                return
            spans, lengths = [self._unread(tree) for tree in trees], [_chain_length(tree) for tree in trees]
            self._pending = _PendingChains(self.chains.draft(spans, lengths), trees, parts_of(spans, lengths))
        else:
            self._draft_levels(trees)
            self._finish(trees)
        self.compiled = self._passes.firsts > firsts

    def draft_ahead(self, requests: Sequence[DraftRequest], verified: Sequence[int]) -> bool:
        """Begin to draft chains after the tokens that the running step will yield: see
        DeviceDrafter.draft_ahead. Return whether kernels were compiled or graphs captured."""
        spans = [
            self._rows(request, request.length, [0] * (1 + nodes))
            for request, nodes in zip(requests, verified, strict=True)
        ]
        lengths = [request.depth for request in requests]
        if not (self.chains and self.chains.fits(len(spans), max(lengths)) and self.chains.follows(spans)):
            return False
        firsts, chains = self._passes.firsts, self.chains.follow(spans, lengths)
        compiled = self._passes.firsts > firsts
        self._ahead = Ahead(chains, requests, parts_of(spans, lengths), compiled)
        return compiled

    def forget_ahead(self) -> None:
        """Implement DeviceDrafter.forget_ahead."""
        self._ahead = None

    def _draft_levels(self, trees: Sequence[_TreeBuilder]) -> None:
        hidden = self._read(trees)
        growing = [tree for tree in trees if tree.unfinished]
        if len(growing) < len(trees):
            hidden = hidden[[row for row, tree in enumerate(trees) if tree.unfinished]]
        while growing:
            self._extend(growing, self._passes.logits(hidden))
            growing = [tree for tree in growing if tree.unfinished]
            if growing:
                hidden = self._pass(growing)

    def _finish(self, trees: Sequence[_TreeBuilder]) -> None:
        # Without a tree, a sequence's KV does not count as computed in this group: KV with NaN is not shared.
        self._trees = {tree.request.id: tree.tree() for tree in trees if tree.finite}

    def pending_trees(self) -> dict[int, TokenTree]:
        """Implement DeviceDrafter.pending_trees."""
        if self._pending is None or not self._pending.chains.placed:
            return {}
        self._pending.whole = True
        return self._pending.placed_trees()

    def _take_chains(self, pending: "_PendingChains") -> None:
        """Wait for chains, and make trees of them. Tokens after an unlikely one are left out, unless a step
        verifies the chains as a whole already."""
        drafted, trees = pending.chains.wait(), pending.trees
        self.seconds = pending.chains.seconds
        self.chains_drafted += len(trees)
        for tree, part in zip(trees, pending.parts, strict=True):
            tree.whole = pending.whole
            tree.finite = bool(drafted.finite[part.row : part.row + part.count].all())
            tokens = drafted.tokens[: part.levels, part.number].tolist()
            features = drafted.probabilities[: part.levels, part.number].tolist()
            while tree.unfinished:
                going = tree.depth < part.levels and tokens[tree.depth] >= 0
                tree.grow([[(tokens[tree.depth], features[tree.depth])] if going else []])
        self._finish(trees)

    def _unread(self, tree: _TreeBuilder) -> Span:
        """Return the span of a request's committed tokens without KV, or of the last token if all have KV."""
        request = tree.request
        start = min(request.computed, request.length - 1)
        return self._rows(request, start, request.tokens[start : request.length])

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        pending, self._pending = self._pending, None
        if pending:
            self._take_chains(pending)
        trees, self._trees = self._trees, {}
        return trees

    def release(self, ids: Sequence[int]) -> None:
        for id in ids:
            self._states.forget(id)

    def _start(self, request: DraftRequest) -> _TreeBuilder:
        return _TreeBuilder(request, [request.tokens[request.length - 1]], self._states.of(request))

    def _read(self, trees: Sequence[_TreeBuilder]) -> Tensor:
        """Read all committed tokens without KV; return the hidden state of each sequence's last token."""
        spans = []
        for tree in trees:
            request = tree.request
            tokens, length = request.tokens, request.length
            start = min(request.computed, length - 1)
            while length - start > MAX_QUERY_TOKENS:
                piece = tokens[start : start + MAX_QUERY_TOKENS]
                hidden, _ = self._forward([self._rows(request, start, piece)])
                tree.finite &= bool(finite_rows(hidden).all())
                start += MAX_QUERY_TOKENS
            spans.append(self._rows(request, start, tokens[start:length]))
        hidden, offsets = self._forward(spans)
        finite = finite_rows(hidden)
        for tree, offset, span in zip(trees, offsets, spans, strict=True):
            tree.finite &= bool(finite[offset : offset + len(span.tokens)].all())
        return hidden[[offset + len(span.tokens) - 1 for offset, span in zip(offsets, spans, strict=True)]]

    def _pass(self, trees: Sequence[_TreeBuilder]) -> Tensor:
        """Return the hidden states of the nodes in the trees' levels, tree by tree."""
        hidden, _ = self._forward([self._span(tree) for tree in trees])
        return hidden

    def _span(self, tree: _TreeBuilder) -> Span:
        request, node = tree.request, tree.level[-1]
        if request.width == 1:
            return self._rows(request, request.length - 1 + tree.depth, [tree.tokens[node]])
        start, root, done = request.length - 1, [tree.tokens[0]], tree.level[0]
        return self._rows(request, start, root, tree.tree(), done)

    def _rows(
        self,
        request: DraftRequest,
        start: int,
        tokens: list[int],
        tree: TokenTree | None = None,
        skip: int = 0,
    ) -> Span:
        """Return a span of a request. The target's first layers use the request's adapter, a draft model
        none."""
        adapter = request.adapter if self.group == TARGET else ""
        return Span(request.id, start, tokens, request.blocks, tree=tree, skip=skip, adapter=adapter)

    def _forward(self, spans: Sequence[Span]) -> tuple[Tensor, list[int]]:
        """Return the hidden states of all rows, and the offset of each span."""
        layout = lay_out(spans, self.cache.block_size)
        hidden = self._passes.forward(layout)
        return hidden, [part.offset for part in layout.parts]

    def _extend(self, trees: Sequence[_TreeBuilder], logits: Tensor) -> None:
        """Grow each tree by the draft tokens after its level. `logits` has the rows of the levels' nodes,
        tree by tree."""
        rows = [(tree, node) for tree in trees for node in tree.level]
        params = [tree.request.params for tree, _ in rows]
        choices = [tree.request.choice for tree, _ in rows]
        outputs = [tree.request.output + tree.depth for tree, _ in rows]
        width = max(tree.request.width for tree in trees)
        adjusted, ended = _adjust(rows, logits)
        drafted = self._selector(logits, params, choices, outputs, width, adjusted)
        if self._rejection_sampling:
            sampled_rows = [row for row, candidate in enumerate(params) if not candidate.greedy]
            draws = sample_draft_tokens(
                logits[sampled_rows],
                [params[row] for row in sampled_rows],
                [choices[row] for row in sampled_rows],
                [outputs[row] for row in sampled_rows],
                width,
                {index: adjusted[row] for index, row in enumerate(sampled_rows) if row in adjusted},
            )
            for row, (sampled, distribution) in zip(sampled_rows, draws, strict=True):
                tree, node = rows[row]
                drafted[row], tree.draws[node] = sampled, distribution
        for row in ended:
            drafted[row] = []
        start = 0
        for tree in trees:
            end = start + len(tree.level)
            tree.grow(drafted[start:end])
            start = end


def _is_greedy_chain(tree: _TreeBuilder) -> bool:
    """Return whether a tree is a chain of the likeliest tokens that a device may draft by itself."""
    request = tree.request
    chain = request.width == 1 and all(count == 1 for count in request.expansion or ())
    short = request.length - request.computed <= MAX_QUERY_TOKENS
    return chain and short and _chain_length(tree) > 0 and request.params.greedy and tree.state is None


def _chain_length(tree: _TreeBuilder) -> int:
    return min(tree.request.depth, tree.request.nodes)


def _adjust(rows: Sequence[tuple[_TreeBuilder, int]], logits: Tensor) -> tuple[dict[int, Scores], list[int]]:
    """Apply the request's penalties, logit bias and grammar to the draft model's `logits`, for requests that
    have any (a `PathState`); row i belongs to node `rows[i]` of a tree. Return the resulting scores by row,
    and the rows that get no further draft tokens: the text ends on the path to the node, or the grammar does
    not allow the path."""
    adjusted: dict[int, Scores] = {}
    ended: list[int] = []
    for row, (tree, node) in enumerate(rows):
        if tree.state is None:
            continue
        scores = tree.state.adjusted(logits[row].float(), tree.path_to(node))
        if scores is None:
            ended.append(row)
        else:
            adjusted[row] = scores
    return adjusted, ended
