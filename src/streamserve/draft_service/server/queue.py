"""Fair queueing: the order in which sessions are drafted for, and which are batched.

Weighted fair order: each account has a virtual time, the seconds of drafting it has received divided by its
weight, and the one with the least goes first. Within a window above the least, in which accounts have had
similar amounts, requests with a target for the time per token go first, by when their next token is due, then
the earliest deadline. Of the sessions of one account the one that has received least goes first; its second
comes after the first of every other account. Prompts are read ahead while nothing waits for a tree.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from streamserve.draft_service.server.accounts import Account
from streamserve.draft_service.server.sessions import DraftedSequence, Session

DEFAULT_DEADLINE = 10.0
"""Default deadline, in seconds after the request."""
LEAD_BATCHES = 2.0
"""How many batches an account may be ahead of another because of its deadline."""
DEEPER_FACTOR = 2
MIN_DEEP_LEVELS = 8
"""A batch takes as long as its deepest tree: a sequence with a tree that is deeper than this many times the
first's, and than this many levels, waits for a separate batch."""

Member = tuple[Session, list[DraftedSequence]]


def in_order(sessions: Iterable[Session], batch_seconds: float) -> list[Session]:
    """Return the waiting sessions in service order; a batch takes about `batch_seconds` seconds."""
    waiting = [session for session in sessions if session.requested_at is not None]
    if not waiting:
        return []
    window = min(session.account.virtual for session in waiting) + LEAD_BATCHES * batch_seconds
    waiting.sort(key=lambda one: _order_key(one, window))
    ranks: dict[Account, int] = {}
    ranked: list[tuple[bool, bool, int, int]] = []
    for number, session in enumerate(waiting):
        rank = ranks[session.account] = ranks.get(session.account, -1) + 1
        ranked.append((not session.wants_trees, session.account.virtual > window, rank, number))
    return [waiting[number] for *_, number in sorted(ranked)]


def _order_key(session: Session, window: float) -> tuple[bool, bool, float, float, float, int]:
    late = session.account.virtual > window
    assert session.requested_at is not None
    deadline = session.requested_at + DEFAULT_DEADLINE if session.deadline is None else session.deadline
    order = (session.account.virtual, 0.0) if late else (session.due, deadline)
    return not session.wants_trees, late, *order, session.virtual, session.tag


@dataclass(frozen=True)
class Bounds:
    """Limits of one batch: `targets`, seconds if it has several, nodes of all trees, and tokens read; fewer
    that are read ahead, as trees that are requested meanwhile wait for the batch."""

    targets: int
    seconds: float
    nodes: int
    tokens: int
    read_ahead: int


def batch(
    ordered: list[Session],
    cost: Callable[[list[DraftedSequence]], float],
    bounds: Bounds,
    unread: Callable[[DraftedSequence], int],
) -> list[Member]:
    """Return the first of `ordered` and as many after it as can be drafted for in one batch: within `bounds`,
    and in less time than one after the other. A session's sequences beyond the bounds wait for its next
    turn."""
    chosen: list[Member] = []
    together: list[DraftedSequence] = []
    spent = 0.0
    nodes, tokens = bounds.nodes, bounds.tokens
    for session in ordered[: bounds.targets]:
        # The least recently used are first, unless tokens are due.
        waiting = sorted(session.waiting(), key=lambda one: (inf if one.due is None else one.due, one.used))
        if not session.wants_trees:
            if chosen:
                break
            tokens = min(tokens, bounds.read_ahead)
        own = _within(waiting, nodes, tokens, unread, not chosen)
        if not own or (
            chosen and (session.draft_alone or chosen[0][0].draft_alone or _deeper(own, together))
        ):
            break
        if len(ordered) > 1:
            whole = cost([*together, *own])
            if chosen and (whole > bounds.seconds or whole >= spent + cost(own)):
                break
            spent = whole
        chosen.append((session, own))
        together += own
        nodes -= sum(sequence.requested.nodes for sequence in own if sequence.requested)
        tokens -= sum(unread(sequence) for sequence in own)
    return chosen


def _within(
    waiting: list[DraftedSequence],
    nodes: int,
    tokens: int,
    unread: Callable[[DraftedSequence], int],
    first: bool,
) -> list[DraftedSequence]:
    """Return as many of `waiting` as fit the limits of nodes and tokens; at least one for the `first`
    session."""
    fitting: list[DraftedSequence] = []
    for sequence in waiting:
        assert sequence.requested is not None
        nodes -= sequence.requested.nodes
        tokens -= unread(sequence)
        if (nodes < 0 or tokens < 0) and not (first and not fitting):
            break
        fitting.append(sequence)
    return fitting


def _deeper(own: list[DraftedSequence], together: list[DraftedSequence]) -> bool:
    return _depth(own) > max(DEEPER_FACTOR * _depth(together), MIN_DEEP_LEVELS)


def _depth(sequences: list[DraftedSequence]) -> int:
    return max((sequence.requested.depth for sequence in sequences if sequence.requested), default=0)
