"""Requests with a grammar wait outside of the engine until it is compiled, which takes up to a second.

In the engine the first step of such a request would compile, and all decoding would stand still. Whatever
else comes for a request that waits, waits with it, in order.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Protocol

from streamserve.protocol.grammar import Grammar
from streamserve.protocol.messages import Submit, ToEngine
from streamserve.protocol.tickets import Push, Release


class Compiler(Protocol):
    """What compiles grammars, and keeps them (execution.grammar.Grammars)."""

    def knows(self, grammar: Grammar) -> bool: ...

    def prepare(self, grammar: Grammar) -> None:
        """Compile `grammar`, in any thread; what is wrong with it is kept too."""


class GrammarGate:
    """Holds back messages for the engine while a thread compiles."""

    def __init__(self, compiler: Compiler | None) -> None:
        self._compiler = compiler
        self._held: dict[str, list[ToEngine]] = {}
        self._compiling: dict[Grammar, tuple[Future[None], list[str]]] = {}

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammar")

    @property
    def waiting(self) -> bool:
        """Whether something is held back."""
        return bool(self._held)

    def take(self, message: ToEngine) -> list[ToEngine]:
        """What the engine is to handle now that `message` came: it, or nothing."""
        if isinstance(message, Push | Release):  # of what the engine has already
            return [message]
        if message.request in self._held:
            self._held[message.request].append(message)
            return []
        grammar = message.params.grammar if isinstance(message, Submit) else None
        if grammar is None or self._compiler is None or self._compiler.knows(grammar):
            return [message]
        self._held[message.request] = [message]
        if grammar not in self._compiling:
            self._compiling[grammar] = self._thread.submit(self._compiler.prepare, grammar), []
        self._compiling[grammar][1].append(message.request)
        return []

    def ready(self) -> list[ToEngine]:
        """What was held back for grammars that are compiled now."""
        done = [grammar for grammar, (future, _) in self._compiling.items() if future.done()]
        return [
            message
            for grammar in done
            for request in self._compiling.pop(grammar)[1]
            for message in self._held.pop(request)
        ]

    def close(self) -> None:
        """Let go of the thread."""
        if "_thread" in self.__dict__:
            self._thread.shutdown(wait=False, cancel_futures=True)
