"""Holds back requests with a grammar until the grammar is compiled, which takes up to a second.

Without this, the engine would compile it in the request's first step and stall all decoding. All further
messages for a waiting request wait with it, in order.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Protocol

from streamserve.protocol.grammar import Grammar
from streamserve.protocol.messages import LoadAdapter, Submit, ToEngine, UnloadAdapter
from streamserve.protocol.transfers import Push, Release


class Compiler(Protocol):
    """A grammar compiler with a cache (execution.compute.grammar.Grammars)."""

    def is_cached(self, grammar: Grammar) -> bool:
        """Return whether `grammar` was compiled, or found to have an error."""

    def prepare(self, grammar: Grammar) -> None:
        """Compile `grammar`, from any thread; an error in it is cached too."""


class GrammarQueue:
    """Holds back messages for the engine while a thread compiles."""

    def __init__(self, compiler: Compiler | None) -> None:
        self._compiler = compiler
        self._waiting: dict[str, list[ToEngine]] = {}
        self._compiling: dict[Grammar, tuple[Future[None], list[str]]] = {}

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammar")

    @property
    def waiting(self) -> bool:
        """Whether messages are held back."""
        return bool(self._waiting)

    def accept(self, message: ToEngine) -> list[ToEngine]:
        """Return the messages for the engine when `message` arrives: this message, or none if it is held
        back."""
        # Not for a request that may wait.
        if isinstance(message, Push | Release | LoadAdapter | UnloadAdapter):
            return [message]
        if message.request in self._waiting:
            self._waiting[message.request].append(message)
            return []
        grammar = message.params.grammar if isinstance(message, Submit) else None
        if grammar is None or self._compiler is None or self._compiler.is_cached(grammar):
            return [message]
        self._waiting[message.request] = [message]
        if grammar not in self._compiling:
            self._compiling[grammar] = self._thread.submit(self._compiler.prepare, grammar), []
        self._compiling[grammar][1].append(message.request)
        return []

    def ready(self) -> list[ToEngine]:
        """Return the held-back messages whose grammars are compiled now."""
        done = [grammar for grammar, (future, _) in self._compiling.items() if future.done()]
        return [
            message
            for grammar in done
            for request in self._compiling.pop(grammar)[1]
            for message in self._waiting.pop(request)
        ]

    def close(self) -> None:
        """Stop the thread."""
        if "_thread" in self.__dict__:
            self._thread.shutdown(wait=False, cancel_futures=True)
