"""Who is drafted for next, and together with whom.

Weighted fair order: each session has a virtual time, the seconds it was drafted for divided by its weight,
and the one with the least goes first. Within a window above the least, where nobody has had much more than
others, the one that wants its trees soonest goes first.
"""

from collections.abc import Callable, Iterable

from streamserve.drafting.sessions import DraftedSequence, Session

PATIENCE = 10.0
"""Seconds in which who does not say otherwise wants its trees."""
TURNS = 2.0
"""Turns of the service that one may get before another for its deadline's sake."""


def in_order(sessions: Iterable[Session], turn: float) -> list[Session]:
    """The waiting sessions, the next one first; a turn of the service takes some `turn` seconds."""
    waiting = [session for session in sessions if session.asked is not None]
    if not waiting:
        return []
    window = min(session.virtual for session in waiting) + TURNS * turn
    return sorted(waiting, key=lambda one: _place(one, window))


def _place(session: Session, window: float) -> tuple[bool, float, int]:
    late = session.virtual > window
    assert session.asked is not None
    wish = session.asked + PATIENCE if session.deadline is None else session.deadline
    return late, session.virtual if late else wish, session.tag


def batch(
    ordered: list[Session], cost: Callable[[list[DraftedSequence]], float], most: int, bound: float
) -> list[tuple[Session, list[DraftedSequence]]]:
    """The first of `ordered`, and as many after it, `most` in all, as can be drafted for in the same passes:
    the whole takes no more than `bound` seconds, and less than one after the other."""
    if len(ordered[:most]) == 1:
        return [(ordered[0], ordered[0].waiting())]
    chosen: list[tuple[Session, list[DraftedSequence]]] = []
    together: list[DraftedSequence] = []
    spent = 0.0
    for session in ordered[:most]:
        own = session.waiting()
        whole = cost([*together, *own])
        if chosen and (whole > bound or whole >= spent + cost(own)):
            break
        chosen.append((session, own))
        together += own
        spent = whole
    return chosen
