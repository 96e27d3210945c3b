"""Prompt lookup: find an earlier occurrence of the last tokens in the text, and draft the tokens after it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamserve.contracts.plan import DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.execution.compute.grammar import Grammars
from streamserve.execution.drafters.path_state import PathStates

MAX_NGRAM, MIN_NGRAM = 4, 2
"""Longest and shortest n-gram that is looked up; the longest is tried first."""


@dataclass
class _Index:
    """The index after the latest occurrence of each n-gram, among n-grams in the first `length` tokens of a
    sequence that do not include the last of these tokens."""

    epoch: int
    length: int = 0
    following: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, tokens: list[int], length: int) -> None:
        """Add the n-grams of the tokens up to `length` to the index."""
        for end in range(self.length, length):
            for size in range(MIN_NGRAM, min(MAX_NGRAM, end) + 1):
                self.following[tuple(tokens[end - size : end])] = end
        self.length = length

    def find_match(self, tokens: list[int]) -> tuple[int, int]:
        """Return the index after the earlier occurrence of the longest n-gram that the indexed tokens end
        with, and the n-gram's length; (0, 0) if there is none."""
        length = self.length
        for size in range(min(MAX_NGRAM, length), MIN_NGRAM - 1, -1):
            start = self.following.get(tuple(tokens[length - size : length]))
            if start is not None:
                return start, size
        return 0, 0


class NGramDrafter:
    """A drafter by prompt lookup (contracts.plan.Drafter). Its chains are copies from the request's own text,
    cut where the request's grammar does not allow them."""

    group = None

    def __init__(self, eos_token_ids: Sequence[int] = (), grammars: Grammars | None = None) -> None:
        self._states = PathStates(eos_token_ids, grammars)
        self._indexes: dict[int, _Index] = {}
        self._requests: Sequence[DraftRequest] = ()

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._requests = requests
        for request in requests:
            index = self._indexes.get(request.id)
            if index is None or index.epoch != request.epoch or index.length > request.length:
                index = self._indexes[request.id] = _Index(request.epoch)
            index.extend(request.tokens, request.length)

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        trees = {}
        for request in self._requests:
            tokens, length = request.tokens, request.length
            start, size = self._indexes[request.id].find_match(tokens)
            end = min(start + min(request.depth, request.nodes), length)
            draft_tokens = tokens[start:end] if size else []
            if draft_tokens and (state := self._states.of(request)):
                draft_tokens = draft_tokens[: state.count_accepted(draft_tokens)]
            if draft_tokens:
                trees[request.id] = _chain(tokens[length - 1], draft_tokens, (size + 1) / (MAX_NGRAM + 2))
        self._requests = ()
        return trees

    def release(self, ids: Sequence[int]) -> None:
        for id in ids:
            self._indexes.pop(id, None)
            self._states.forget(id)


def _chain(root: int, draft_tokens: Sequence[int], score: float) -> TokenTree:
    """Return a chain whose nodes all have the score `score`. The caller gives longer matches a higher score,
    because they are likelier to continue."""
    size = 1 + len(draft_tokens)
    accept = tuple(score**depth for depth in range(size))
    return TokenTree(
        (root, *draft_tokens), tuple(range(-1, size - 1)), (1.0, *[score] * len(draft_tokens)), accept
    )
