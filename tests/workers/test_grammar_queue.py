"""Requests wait for their grammars outside of the engine, in order, without blocking others."""

import threading

from streamserve.protocol.grammar import Grammar
from streamserve.protocol.messages import Cancel, Submit, ToEngine
from streamserve.protocol.sampling import SamplingParams
from streamserve.workers.grammar_queue import GrammarQueue
from tests.api.serving import until

DIGITS, LETTERS = Grammar(kind="regex", text="[0-9]+"), Grammar(kind="regex", text="[a-z]+")


class Compiler:
    """A compiler that finishes grammars when the test tells it to."""

    def __init__(self) -> None:
        self.go = {DIGITS: threading.Event(), LETTERS: threading.Event()}
        self.prepared: list[Grammar] = []

    def is_cached(self, grammar: Grammar) -> bool:
        return grammar in self.prepared

    def prepare(self, grammar: Grammar) -> None:
        assert self.go[grammar].wait(30)
        self.prepared.append(grammar)


def submit(request: str, grammar: Grammar | None = None) -> Submit:
    return Submit(request, [1], SamplingParams(grammar=grammar), outputs={0: []})


def test_requests_that_wait_for_a_grammar_do_not_block_others() -> None:
    compiler = Compiler()
    listener = GrammarQueue(compiler)
    plain, first, second, other = submit("a"), submit("b", DIGITS), submit("c", DIGITS), submit("d", LETTERS)
    assert [listener.accept(message) for message in (first, plain, second, other)] == [[], [plain], [], []]
    cancel: ToEngine = Cancel("b", 0)
    assert listener.accept(cancel) == []
    assert listener.accept(Cancel("a", 0)) == [Cancel("a", 0)]
    assert (listener.ready(), listener.waiting) == ([], True)
    compiler.go[DIGITS].set()
    ready: list[ToEngine] = []

    def arrived() -> bool:
        ready.extend(listener.ready())
        return len(ready) == 3

    until(arrived)
    assert ready == [first, cancel, second]
    assert listener.accept(submit("e", DIGITS)) == [submit("e", DIGITS)]
    compiler.go[LETTERS].set()
    until(lambda: bool(ready.extend(listener.ready()) or not listener.waiting))
    assert ready[3:] == [other]
    assert compiler.prepared == [DIGITS, LETTERS]
    listener.close()


def test_without_a_tokenizer_nothing_waits() -> None:
    listener = GrammarQueue(None)
    assert listener.accept(submit("a", DIGITS)) == [submit("a", DIGITS)]
    listener.close()
