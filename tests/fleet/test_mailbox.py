"""A client that reads slowly holds a bounded memory, and does not cost others theirs."""

import asyncio

from streamserve.fleet.events import Deliver, Refuse
from streamserve.fleet.mailbox import FAIR_BYTES, Mailbox, Undelivered
from streamserve.protocol.messages import Event, PromptLogprob, PromptLogprobs, Token, TopLogprob

TOP = [TopLogprob(token, -1.0) for token in range(64)]


def token(index: int) -> Event:
    return Token("r", 0, 0, index, 7, -1.0, TOP)


async def test_what_is_read_in_time_is_all_there() -> None:
    budget = Undelivered(limit=100_000)
    mailbox = Mailbox(budget)
    for index in range(1000):
        mailbox.put(Deliver("r", [token(index)], index == 999))
        news = await mailbox.get()
        assert isinstance(news, Deliver)
        assert news.events == [token(index)]
        assert budget.held == 0


async def test_who_leaves_too_much_unread_has_to_go_and_the_others_do_not() -> None:
    budget = Undelivered(limit=1 << 20)
    slow, other = Mailbox(budget), Mailbox(budget)
    for index in range(1000):
        slow.put(Deliver("slow", [token(index)], False))
        assert budget.held <= budget.limit + FAIR_BYTES
    assert slow.overflowed
    assert budget.held == 0
    news = await slow.get()
    assert isinstance(news, Refuse)
    assert (news.error.status, "unread" in news.error.message) == (503, True)
    assert slow.empty()
    other.put(Deliver("other", [token(0)], True))
    assert isinstance(await asyncio.wait_for(other.get(), 5), Deliver)


def test_scores_of_a_prompt_are_counted() -> None:
    budget = Undelivered()
    mailbox = Mailbox(budget)
    entries = [PromptLogprob(5, -1.0, 1, TOP)] * 100
    mailbox.put(Deliver("r", [PromptLogprobs("r", 0, 1, entries)], False))
    assert budget.held > 100 * 65 * 100
    mailbox.clear()
    assert (budget.held, mailbox.empty()) == (0, True)
