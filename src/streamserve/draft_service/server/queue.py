"""Who is drafted for next, and together with whom.

Weighted fair order: each account has a virtual time, the seconds it was drafted for divided by its weight,
and the one with the least goes first. Within a window above the least, where nobody has had much more than
others, the one that wants its trees soonest goes first. Of the sessions of one account the one that has had
least goes first; its second comes after the first of every other.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from streamserve.draft_service.server.accounts import Account
from streamserve.draft_service.server.sessions import DraftedSequence, Session

PATIENCE = 10.0
"""Seconds in which who does not say otherwise wants its trees."""
TURNS = 2.0
"""Turns of the service that one may get before another for its deadline's sake."""
DEEPER = 2
LEAST_DEEP = 8
"""Trees in one batch take as long as the deepest: one that is deeper than so many times the first's, and than
so many levels, waits for a batch of its own."""

Member = tuple[Session, list[DraftedSequence]]


def in_order(sessions: Iterable[Session], turn: float) -> list[Session]:
    """The waiting sessions, the next one first; a turn of the service takes some `turn` seconds."""
    waiting = [session for session in sessions if session.asked is not None]
    if not waiting:
        return []
    window = min(session.account.virtual for session in waiting) + TURNS * turn
    waiting.sort(key=lambda one: _place(one, window))
    ranks: dict[Account, int] = {}
    ranked: list[tuple[bool, int, int]] = []
    for number, session in enumerate(waiting):
        rank = ranks[session.account] = ranks.get(session.account, -1) + 1
        ranked.append((session.account.virtual > window, rank, number))
    return [waiting[number] for _, _, number in sorted(ranked)]


def _place(session: Session, window: float) -> tuple[bool, float, float, int]:
    late = session.account.virtual > window
    assert session.asked is not None
    wish = session.asked + PATIENCE if session.deadline is None else session.deadline
    return late, session.account.virtual if late else wish, session.virtual, session.tag


@dataclass(frozen=True)
class Bounds:
    """Of one batch: `targets`, seconds if it is for several, nodes of all trees, and tokens that are read."""

    targets: int
    seconds: float
    nodes: int
    rows: int


def batch(
    ordered: list[Session],
    cost: Callable[[list[DraftedSequence]], float],
    bounds: Bounds,
    unread: Callable[[DraftedSequence], int],
) -> list[Member]:
    """The first of `ordered`, and as many after it as can be drafted for in the same passes: within `bounds`,
    and in less time than one after the other. What a session has beyond them waits for its next turn."""
    chosen: list[Member] = []
    together: list[DraftedSequence] = []
    spent = 0.0
    nodes, rows = bounds.nodes, bounds.rows
    for session in ordered[: bounds.targets]:
        waiting = sorted(session.waiting(), key=lambda one: one.used)  # that of none is always left over
        own = _within(waiting, nodes, rows, unread, not chosen)
        if not own or (chosen and (session.apart or chosen[0][0].apart or _deeper(own, together))):
            break
        if len(ordered) > 1:
            whole = cost([*together, *own])
            if chosen and (whole > bounds.seconds or whole >= spent + cost(own)):
                break
            spent = whole
        chosen.append((session, own))
        together += own
        nodes -= sum(one.wanted.nodes for one in own if one.wanted)
        rows -= sum(unread(one) for one in own)
    return chosen


def _within(
    waiting: list[DraftedSequence],
    nodes: int,
    rows: int,
    unread: Callable[[DraftedSequence], int],
    first: bool,
) -> list[DraftedSequence]:
    """As many of `waiting` as stay within so many nodes and rows; at least one of the `first` session."""
    found: list[DraftedSequence] = []
    for sequence in waiting:
        assert sequence.wanted is not None
        nodes -= sequence.wanted.nodes
        rows -= unread(sequence)
        if (nodes < 0 or rows < 0) and not (first and not found):
            break
        found.append(sequence)
    return found


def _deeper(own: list[DraftedSequence], together: list[DraftedSequence]) -> bool:
    return _depth(own) > max(DEEPER * _depth(together), LEAST_DEEP)


def _depth(sequences: list[DraftedSequence]) -> int:
    return max((one.wanted.depth for one in sequences if one.wanted), default=0)
