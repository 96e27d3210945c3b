"""Prompt lookup: where the last tokens occurred before in the text, draft the tokens that followed there."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamserve.engine.plan import DraftRequest
from streamserve.execution.drafters.path_state import PathStates
from streamserve.execution.grammar import Grammars
from streamserve.speculation.tree import TokenTree

MAX_NGRAM, MIN_NGRAM = 4, 2
"""Lengths of the n-grams that are looked up, the longest first."""


@dataclass
class _History:
    """A sequence's tokens, and for each n-gram in them the index after its latest occurrence."""

    epoch: int
    tokens: list[int] = field(default_factory=list)
    following: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for size in range(MIN_NGRAM, min(MAX_NGRAM, end) + 1):
                self.following[tuple(self.tokens[end - size :])] = end
            self.tokens.append(token)

    def find_match(self) -> tuple[int, int]:
        """Return the index after the longest n-gram that the text ends with, and its length; (0, 0) if
        none."""
        for size in range(min(MAX_NGRAM, len(self.tokens)), MIN_NGRAM - 1, -1):
            start = self.following.get(tuple(self.tokens[-size:]))
            if start is not None:
                return start, size
        return 0, 0


class NGramDrafter:
    """Prompt lookup decoding (engine.plan.Drafter): chains copied from the request's own text, as far as its
    grammar, if it has one, allows them."""

    group = None

    def __init__(self, eos_token_ids: Sequence[int] = (), grammars: Grammars | None = None) -> None:
        self._states = PathStates(eos_token_ids, grammars)
        self._histories: dict[int, _History] = {}
        self._requests: Sequence[DraftRequest] = ()

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._requests = requests
        for request in requests:
            history = self._histories.get(request.id)
            if history is None or history.epoch != request.epoch or len(history.tokens) != request.retained:
                retained = history.tokens[: request.retained] if history else []
                history = self._histories[request.id] = _History(request.epoch)
                history.extend(retained)
            history.extend(request.new_tokens)

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        trees = {}
        for request in self._requests:
            history = self._histories[request.id]
            start, size = history.find_match()
            draft_tokens = history.tokens[start : start + min(request.depth, request.nodes)] if size else []
            if draft_tokens and (state := self._states.of(request, history.tokens)):
                draft_tokens = draft_tokens[: state.count_accepted(draft_tokens)]
            if draft_tokens:
                trees[request.id] = _chain(history.tokens[-1], draft_tokens, (size + 1) / (MAX_NGRAM + 2))
        self._requests = ()
        return trees

    def release(self, ids: Sequence[int]) -> None:
        for id in ids:
            self._histories.pop(id, None)
            self._states.forget(id)


def _chain(root: int, draft_tokens: Sequence[int], score: float) -> TokenTree:
    """Return a chain whose nodes all have the same score: a longer match is likelier to continue."""
    size = 1 + len(draft_tokens)
    accept = tuple(score**depth for depth in range(size))
    return TokenTree(
        (root, *draft_tokens), tuple(range(-1, size - 1)), (1.0, *[score] * len(draft_tokens)), accept
    )
