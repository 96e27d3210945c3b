"""Grammar-constrained decoding: the tokens allowed after a request's outputs and a path of draft tokens.

committed outputs ── path ──▶ position of the mask
The matcher follows a path by consuming tokens, and leaves it by rolling them back. So traversing a tree in
depth-first order costs one token a node. Only `commit` advances the committed state.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from streamserve.protocol.grammar import NO_TEXT, Grammar, check_grammar, readable_error, to_llguidance

Mask = NDArray[np.uint8]
"""One bit for each token, 1 if it is allowed. Bit 0 of byte 0 is token 0. Tokens beyond the mask's end are
not allowed."""

MAX_COMPILED = 64
"""Maximum number of compiled grammars that stay cached for later requests."""


_DEAD_END = "the output came to a dead end of its grammar: after it, the grammar allows no token and no end"


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or whose parser reached a limit."""


class Grammars:
    """A compiler of grammars, with a cache. `vocabulary` builds the vocabulary; it is called for the first
    grammar."""

    def __init__(self, vocabulary: Callable[[], LLTokenizer], eos_token_ids: Sequence[int]) -> None:
        self._make_vocabulary = vocabulary
        self._eos_token_ids = tuple(eos_token_ids)
        self._compiled: OrderedDict[Grammar, LLMatcher | GrammarError] = OrderedDict()
        self._lock = Lock()

    def is_cached(self, grammar: Grammar) -> bool:
        """Return whether `begin` can use a cached compilation."""
        with self._lock:
            return grammar in self._compiled

    def prepare(self, grammar: Grammar) -> None:
        """Compile `grammar` and cache the result. May be called in any thread. Errors are cached too, and
        raised by `begin`."""
        if not self.is_cached(grammar):
            try:
                self._cache(grammar, self._compile(grammar))
            except GrammarError as error:
                self._cache(grammar, error)

    def begin(self, grammar: Grammar, outputs: Sequence[int]) -> "Matcher":
        """Return a matcher positioned after `outputs`. Raises GrammarError if the grammar cannot be
        followed."""
        matcher = Matcher(self._prototype(grammar).deep_copy(), self._eos_token_ids, self._size)
        matcher.commit(outputs)
        if matcher.error:
            raise GrammarError(matcher.error)
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return self._make_vocabulary()

    @property
    def _size(self) -> int:
        return self._vocabulary.vocab_size

    def _prototype(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            compiled = self._compiled.get(grammar)
        compiled = compiled or self._compile(grammar)
        self._cache(grammar, compiled)
        if isinstance(compiled, GrammarError):
            raise compiled
        return compiled

    def _cache(self, grammar: Grammar, compiled: LLMatcher | GrammarError) -> None:
        """Cache the result of compiling a grammar as the most recently used one."""
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if not self._eos_token_ids:
            raise GrammarError("this model has no end-of-text token, which a grammar needs")
        try:
            check_grammar(grammar)
            matcher = LLMatcher(self._vocabulary, to_llguidance(grammar), log_level=0)
        except Exception as error:  # of any kind: only the grammar's request may fail
            raise GrammarError(f"the grammar {error}") from error
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {readable_error(matcher.get_error())}")
        return matcher


class Matcher:
    """A request's position in its grammar. `error` says why the request cannot go on; empty if it can."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._path: list[int] = []
        self.error = ""

    def allowed(self, path: Sequence[int]) -> Mask | None:
        """Return the mask of tokens that are allowed after the committed tokens and `path`; None if the
        grammar does not allow `path` itself.

        The end-of-text tokens are allowed where the text may end. After one of them, and if the parser has
        failed, only they are allowed.
        """
        if self.error:
            return self._only_end
        text = self._text(path)
        if not self._move_to(text) or (len(text) < len(path) and not self._matcher.is_accepting()):
            return None
        if len(text) < len(path) or self._matcher.is_stopped():
            self._note_error()
            return self._only_end
        ends = self._only_end
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(ends)]
        self._note_error()
        if self.error:
            return ends
        return mask | ends if self._matcher.is_accepting() else mask & ~ends

    def count_accepted(self, path: Sequence[int]) -> int:
        """Return the number of tokens of `path` that the grammar accepts after the committed tokens, up to
        the end of the text."""
        if self.error:
            return 0
        text = self._text(path)
        self._move_to(text)
        taken = len(self._path)
        return taken + (taken == len(text) < len(path) and self._matcher.is_accepting())

    def commit(self, tokens: Sequence[int]) -> None:
        """Advance the committed state by `tokens`. An end-of-text token does not advance the parser."""
        if not self.error and not self._move_to(self._text(tokens)):
            self.error = "the output does not match its grammar"
        self._path = []

    def ends(self, token: int) -> bool:
        return token in self._eos_token_ids

    def _text(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return `tokens` up to the first end-of-text token, if they contain one."""
        ends = (index for index, token in enumerate(tokens) if token in self._eos_token_ids)
        return tokens[: next(ends, len(tokens))]

    def _move_to(self, path: Sequence[int]) -> bool:
        """Move to the position after `path`; returns whether the grammar allows it. If not, the position is
        at the last token that it allows."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        if common < len(self._path):
            self._matcher.rollback(len(self._path) - common)
            del self._path[common:]
        remaining = list(path[common:])
        taken = self._matcher.try_consume_tokens(remaining) if remaining else 0
        self._path += remaining[:taken]
        self._note_error()
        return taken == len(remaining)

    def _note_error(self) -> None:
        if self._matcher.is_error():
            problem = readable_error(self._matcher.get_error())
            self.error = _DEAD_END if problem == NO_TEXT else f"the grammar's parser failed: {problem}"

    @cached_property
    def _only_end(self) -> Mask:
        bits = np.zeros((self._vocab_size + 31) // 32 * 32, np.uint8)
        bits[list(self._eos_token_ids)] = 1
        return np.packbits(bits, bitorder="little")
