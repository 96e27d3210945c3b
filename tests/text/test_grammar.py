"""A grammar is compiled before its request is admitted, within limits."""

import asyncio
import threading

import pytest

from streamserve.protocol.errors import RequestError
from streamserve.protocol.grammar import Grammar
from streamserve.text.grammar import GrammarCheck, as_lark, compiler, vocabulary
from streamserve.text.tokenizer import Tokenizer

DIGITS = Grammar(kind="regex", text="[0-9]+")


def check(compile: object, max_bytes: int = 1000, seconds: float = 5.0) -> GrammarCheck:
    return GrammarCheck(compile, max_bytes, seconds)  # type: ignore[arg-type]


async def refused(checking: GrammarCheck, grammar: Grammar) -> RequestError:
    with pytest.raises(RequestError) as error:
        await checking(grammar, "guided_regex")
    assert error.value.field == "guided_regex"
    return error.value


@pytest.fixture(params=["bpe", "spm"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


async def test_a_grammar_is_compiled_once(tokenizer: Tokenizer) -> None:
    compiled = []
    compile = compiler(tokenizer, tokenizer.vocab_size, (1,))

    def counted(grammar: Grammar) -> str:
        compiled.append(grammar)
        return compile(grammar)

    checking = check(counted)
    for _ in range(3):
        await checking(DIGITS, "guided_regex")
    assert compiled.count(DIGITS) == 1
    checking.close()


async def test_errors_name_the_field(tokenizer: Tokenizer) -> None:
    checking = check(compiler(tokenizer, tokenizer.vocab_size, (1,)))
    error = await refused(checking, Grammar(kind="regex", text="(("))
    assert error.status == 400
    assert "cannot be compiled" in error.message
    assert "unclosed group" in error.message
    endless = (Grammar(kind="lark", text="start: start"), Grammar(kind="json", text='{"$ref": "#"}'))
    for grammar in endless:
        error = await refused(checking, grammar)
        assert error.message == "guided_regex cannot be compiled: no text fulfils it"
    error = await refused(checking, Grammar(kind="regex", text="x" * 1001))
    assert "at most 1000 bytes are allowed" in error.message
    error = await refused(check(compiler(tokenizer, 10, ())), DIGITS)
    assert "no end-of-text token" in error.message


class Slow:
    """A compiler that blocks on each grammar until `done`, except on the first one, which is for the
    vocabulary."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.compiled: list[Grammar] = []

    def __call__(self, grammar: Grammar) -> str:
        if self.compiled:
            self.done.wait(60)
        self.compiled.append(grammar)
        return ""


async def test_a_slow_grammar_is_refused_and_waiting_ones_get_503() -> None:
    slow = Slow()
    checking = check(slow, seconds=0.05)
    error = await refused(checking, DIGITS)
    assert error.status == 400
    assert "more than 0.05 s" in error.message
    error = await refused(checking, Grammar(kind="regex", text="a"))
    assert (error.status, error.retry_after) == (503, 0.05)
    slow.done.set()
    checking.close()


async def test_a_grammar_waits_for_a_slow_one_outside_of_its_own_time() -> None:
    """A grammar's time limit excludes waiting for a slow one: it is compiled once the slow one has ended,
    although that took longer than both limits."""
    slow = Slow()
    checking = check(slow, seconds=3.0)
    await refused(checking, DIGITS)
    others = [Grammar(kind="regex", text=str(number)) for number in range(3)]
    waiting = [asyncio.create_task(checking(grammar, "guided_regex")) for grammar in others]
    await asyncio.sleep(0.01)  # They wait for a compilation that has not ended.
    assert DIGITS not in slow.compiled
    slow.done.set()
    await asyncio.gather(*waiting)
    assert slow.compiled[1:] == [DIGITS, *others]
    checking.close()


async def test_a_request_that_leaves_the_queue_holds_up_no_others() -> None:
    slow = Slow()
    checking = check(slow, seconds=1.0)
    await refused(checking, DIGITS)
    leaving = [asyncio.create_task(checking(Grammar(kind="regex", text=text), "x")) for text in "ab"]
    await asyncio.sleep(0.01)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    slow.done.set()
    await checking(Grammar(kind="regex", text="c"), "guided_regex")
    assert [grammar.text for grammar in slow.compiled[1:]] == [DIGITS.text, "c"]
    checking.close()


def test_forced_text_has_the_tokens_of_just_its_bytes(tokenizer: Tokenizer) -> None:
    tokens = vocabulary(tokenizer, tokenizer.vocab_size + 3, (1,))
    for text in ('{"a"', "hello", " the", "1", "<|begin|>", "</s>", "ü"):
        ids = tokens.tokenize_str(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert not any(map(tokenizer.is_special, ids))


def test_llama_cpps_grammars_are_read() -> None:
    assert as_lark('start: "a"') == 'start: "a"'
    assert "start:" in as_lark('root ::= "a" | "b"')
    with pytest.raises(ValueError, match="cannot be read"):
        as_lark("root ::= (((")
