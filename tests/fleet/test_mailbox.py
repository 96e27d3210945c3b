"""Event queues of slow clients use limited memory, and do not affect other clients."""

import asyncio

from streamserve.fleet.events import Deliver, Refuse
from streamserve.fleet.mailbox import FAIR_BYTES, Mailbox, MailboxBudget, Mailboxes
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import Event, LikelyToken, PromptLogprob, PromptLogprobs, Token

ERROR = RequestError("over")
TOP = [LikelyToken(token, -1.0) for token in range(64)]


def token(index: int) -> Event:
    return Token("r", 0, 0, index, 7, -1.0, TOP)


async def test_events_that_are_read_in_time_all_arrive() -> None:
    budget = MailboxBudget(limit=100_000)
    mailbox = Mailbox(budget)
    for index in range(1000):
        mailbox.put(Deliver("r", [token(index)], index == 999))
        message = await mailbox.get()
        assert isinstance(message, Deliver)
        assert message.events == [token(index)]
        assert budget.used == 0


async def test_only_a_client_beyond_the_budget_is_dropped() -> None:
    budget = MailboxBudget(limit=1 << 20)
    slow, other = Mailbox(budget), Mailbox(budget)
    for index in range(1000):
        slow.put(Deliver("slow", [token(index)], False))
        assert budget.used <= budget.limit + FAIR_BYTES
    assert slow.overflowed
    assert budget.used == 0
    message = await slow.get()
    assert isinstance(message, Refuse)
    assert (message.error.status, "did not read" in message.error.message) == (503, True)
    assert slow.empty()
    other.put(Deliver("other", [token(0)], True))
    assert isinstance(await asyncio.wait_for(other.get(), 5), Deliver)


def test_prompt_logprobs_are_counted() -> None:
    budget = MailboxBudget()
    mailbox = Mailbox(budget)
    entries = [PromptLogprob(5, -1.0, 1, TOP)] * 100
    mailbox.put(Deliver("r", [PromptLogprobs("r", 0, 1, entries)], False))
    assert budget.used > 100 * 65 * 100
    mailbox.clear()
    assert (budget.used, mailbox.empty()) == (0, True)


async def test_mailboxes_are_open_for_the_time_of_their_request() -> None:
    boxes = Mailboxes()
    boxes.put(Refuse("a", ERROR))
    with boxes.open("a") as mailbox:
        assert "a" in boxes
        assert mailbox.empty(), "it was not open yet"
        with boxes.open("b"):
            boxes.refuse_all(ERROR)
        assert await mailbox.get() == Refuse("a", ERROR)
    assert not boxes
