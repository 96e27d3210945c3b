"""Requests wait for their grammars outside of the engine, in order, and the others do not wait."""

import threading

from streamserve.protocol.grammar import Grammar
from streamserve.protocol.messages import Cancel, Submit, ToEngine
from streamserve.protocol.sampling import SamplingParams
from streamserve.workers.grammar_gate import GrammarQueue
from tests.api.serving import until

DIGITS, LETTERS = Grammar(kind="regex", text="[0-9]+"), Grammar(kind="regex", text="[a-z]+")


class Compiler:
    """Compiles what it is told to."""

    def __init__(self) -> None:
        self.go = {DIGITS: threading.Event(), LETTERS: threading.Event()}
        self.prepared: list[Grammar] = []

    def knows(self, grammar: Grammar) -> bool:
        return grammar in self.prepared

    def prepare(self, grammar: Grammar) -> None:
        assert self.go[grammar].wait(30)
        self.prepared.append(grammar)


def submit(request: str, grammar: Grammar | None = None) -> Submit:
    return Submit(request, 0, [1], SamplingParams(grammar=grammar), {0: []}, 0.0)


def test_who_waits_for_a_grammar_lets_others_pass() -> None:
    compiler = Compiler()
    gate = GrammarQueue(compiler)
    plain, first, second, other = submit("a"), submit("b", DIGITS), submit("c", DIGITS), submit("d", LETTERS)
    assert [gate.take(message) for message in (first, plain, second, other)] == [[], [plain], [], []]
    cancel: ToEngine = Cancel("b", 0)
    assert gate.take(cancel) == []
    assert gate.take(Cancel("a", 0)) == [Cancel("a", 0)]
    assert (gate.ready(), gate.waiting) == ([], True)
    compiler.go[DIGITS].set()
    ready: list[ToEngine] = []

    def came() -> bool:
        ready.extend(gate.ready())
        return len(ready) == 3

    until(came)
    assert ready == [first, cancel, second]
    assert gate.take(submit("e", DIGITS)) == [submit("e", DIGITS)]
    compiler.go[LETTERS].set()
    until(lambda: bool(ready.extend(gate.ready()) or not gate.waiting))
    assert ready[3:] == [other]
    assert compiler.prepared == [DIGITS, LETTERS]
    gate.close()


def test_without_a_tokenizer_nothing_waits() -> None:
    gate = GrammarQueue(None)
    assert gate.take(submit("a", DIGITS)) == [submit("a", DIGITS)]
    gate.close()
