"""Grammars in the API server: the vocabulary for llguidance, and a trial compilation with a time limit."""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from streamserve.protocol.errors import RequestError
from streamserve.protocol.grammar import (
    MAX_GRAMMAR_BYTES,
    MAX_GROUPS,
    Grammar,
    check_grammar,
    readable_error,
    to_llguidance,
)
from streamserve.text.tokenizer import Tokenizer

MAX_CACHED_GRAMMARS = 256
"""Maximum number of grammars in the cache of successful compilations."""

WAIT_FACTOR = 10
"""A request waits this many times the time limit for the compilations before it."""

_MAX_CONVERSION = 4 << 20
"""Maximum number of rules times characters of a grammar in GBNF: its conversion takes about a second."""

_LARK = re.compile(r"(?m)^[ \t]*(?:%llguidance\b|start[ \t]*:)")
"""Matches grammars in Lark, and no grammar in GBNF: the rule `start`, or a directive of llguidance."""

_BLANKS = re.compile(
    r'(\\.|"(?:\\.?|[^"\\])*(?:"|\Z)|\[(?:\\.?|[^\]\\])*(?:\]|\Z))|(?:#[^\r\n]*|[ \t\r\n])+', re.DOTALL
)
"""Matches strings and character classes, which are retained, and runs of whitespace, comments and line
breaks."""

_TRIVIAL = Grammar(kind="regex", text="a")

Compile = Callable[[Grammar], str]
"""Returns the error of a grammar; "" if it compiles."""


class _Tokens:
    """A tokenizer with the interface that LLTokenizer expects.

    It tokenizes text that a grammar forces in the middle of the output: the tokens must have exactly these
    bytes, and must never be special tokens.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: Sequence[int]) -> None:
        tokens = range(min(size, tokenizer.vocab_size))
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in tokens]
        special = {token for token in tokens if tokenizer.is_special(token)}
        self.special_token_ids = sorted(special.union(eos_token_ids))
        ordinary = [token for token in tokens if token not in special.union(eos_token_ids)]
        self._by_bytes = {self.tokens[token]: token for token in reversed(ordinary) if self.tokens[token]}
        self._longest = max(map(len, self._by_bytes), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        ids = self._tokenizer.encode(data.decode(), add_special_tokens=False)
        known = all(token < len(self.tokens) and token not in self.special_token_ids for token in ids)
        if known and b"".join(self.tokens[token] for token in ids) == data:
            return ids
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        """Tokenize greedily. Used if the tokenizer adds spaces to a text, or matches a special token in
        it."""
        ids, position = [], 0
        while position < len(data):
            sizes = range(min(self._longest, len(data) - position), 0, -1)
            size = next((size for size in sizes if data[position : position + size] in self._by_bytes), 0)
            if not size:  # a byte without a token: the forced text ends here
                break
            ids.append(self._by_bytes[data[position : position + size]])
            position += size
        return ids


def vocabulary(tokenizer: Tokenizer, size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return the token bytes of a model with a vocabulary of `size` tokens, which may be larger than the
    tokenizer's.

    Each of `eos_token_ids` ends a text; at least one is required.
    """
    tokens = _Tokens(tokenizer, size, eos_token_ids)
    return LLTokenizer(tokens, n_vocab=size, eos_token=list(eos_token_ids))  # type: ignore[arg-type]


def as_lark(text: str) -> str:
    """Convert a grammar in Lark or llama.cpp's GBNF (`root ::= …`) to Lark.

    The library's conversion takes quadratic time in blank lines and comments, so these are removed first. It
    also takes up to one pass over the text for each rule, so the product of rules and characters is limited.
    Raises ValueError if the text is neither kind of grammar, or too large to convert.
    """
    if len(text) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"has {len(text)} characters; at most {MAX_GRAMMAR_BYTES} bytes are allowed")
    if _LARK.search(text):
        return text
    rules = text.count("::=")
    groups = sum(text.count(sign) for sign in "([{")
    if rules + groups > MAX_GROUPS:
        raise ValueError(
            f"has {rules + groups} rules and groups (::= ( [ {{); at most {MAX_GROUPS} are allowed"
        )
    text = _BLANKS.sub(_one_blank, text)
    if rules * len(text) > _MAX_CONVERSION:
        raise ValueError(
            f"has {rules} rules in {len(text)} characters, too many to convert: their product is at most "
            f"{_MAX_CONVERSION}; write it in Lark instead"
        )
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"cannot be read: {error}") from error


def _one_blank(match: re.Match[str]) -> str:
    """Return a run of whitespace and comments as one line break, or as one space if it is within a line."""
    return match[1] or ("\n" if any(sign in match[0] for sign in "#\r\n") else " ")


class GrammarCheck:
    """Compiles each grammar once before its request is admitted, so that errors are reported early.

    Grammars are compiled one at a time in a thread, in order of arrival: a slow grammar delays only other
    grammars. The time limit of a compilation counts from its start.
    """

    def __init__(self, compile: Compile, max_bytes: int, seconds: float) -> None:
        self._compile = compile
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._compiled_grammars: OrderedDict[Grammar, None] = OrderedDict()
        self._warm = False
        self._turn = asyncio.Lock()
        self._running: asyncio.Future[str] | None = None

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def __call__(self, grammar: Grammar, field: str) -> None:
        """Raise RequestError about `field` if `grammar` is too large, too slow, or cannot be compiled."""
        if grammar in self._compiled_grammars:
            self._compiled_grammars.move_to_end(grammar)
            return
        if len(grammar.text) > self._max_bytes:
            message = f"{field} has {len(grammar.text)} bytes; at most {self._max_bytes} bytes are allowed"
            raise RequestError(message, field=field)
        problem = await self._compiled(grammar, field)
        if problem:
            raise RequestError(f"{field} {problem}", field=field)
        self._compiled_grammars[grammar] = None
        if len(self._compiled_grammars) > MAX_CACHED_GRAMMARS:
            self._compiled_grammars.popitem(last=False)

    async def _compiled(self, grammar: Grammar, field: str) -> str:
        try:
            async with asyncio.timeout(WAIT_FACTOR * self._seconds):
                await self._take_turn()
        except TimeoutError:
            raise RequestError(
                "too many grammars are being compiled", field=field, status=503, retry_after=self._seconds
            ) from None
        try:
            return await self._timed(grammar, field)
        finally:
            self._turn.release()

    async def _take_turn(self) -> None:
        """Wait for earlier compilations, including one that has exceeded its time limit."""
        await self._turn.acquire()
        try:
            if self._running:
                await asyncio.wait({self._running})
        except asyncio.CancelledError:
            self._turn.release()
            raise

    async def _timed(self, grammar: Grammar, field: str) -> str:
        """Compile a grammar whose turn has come. Raises RequestError if it takes too long."""
        if not self._warm:  # the vocabulary is built with the first grammar: exclude this from the time limit
            await asyncio.wrap_future(self._thread.submit(self._compile, _TRIVIAL))
            self._warm = True
        self._running = asyncio.wrap_future(self._thread.submit(self._checked, grammar))
        try:
            return await asyncio.wait_for(asyncio.shield(self._running), self._seconds)
        except TimeoutError:
            text = (
                f"{field} takes more than {self._seconds:g} s to compile, which is the limit "
                "(grammar_timeout)"
            )
            raise RequestError(text, field=field) from None

    def _checked(self, grammar: Grammar) -> str:
        """Return the error of a grammar; "" if it compiles."""
        try:
            check_grammar(grammar, self._max_bytes)
        except ValueError as error:
            return str(error)
        problem = self._compile(grammar)
        return f"cannot be compiled: {problem}" if problem else ""

    def close(self) -> None:
        """Shut down the thread."""
        if "_thread" in self.__dict__:
            self._thread.shutdown(wait=False, cancel_futures=True)


def compiler(tokenizer: Tokenizer, size: int, eos_token_ids: Sequence[int]) -> Compile:
    """Return a function that compiles grammars as a worker of this model does."""
    tokens: list[LLTokenizer] = []

    def compile(grammar: Grammar) -> str:
        if not eos_token_ids:
            return "this model has no end-of-text token, which a grammar needs"
        if not tokens:
            tokens.append(vocabulary(tokenizer, size, eos_token_ids))
        matcher = LLMatcher(tokens[0], to_llguidance(grammar), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return readable_error(matcher.get_error())

    return compile
