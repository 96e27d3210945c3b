"""Fair queueing: the order in which waiting sessions are served, and the choice of sessions for one batch.

- Weighted fair order: each account has a virtual time, the seconds of drafting it has received divided by its
  weight. The account with the lowest virtual time goes first.
- Accounts whose virtual times are within a window above the lowest count as equal. Among them, requests with
  a target for the time per token go first, in the order in which their next tokens are due; then the earliest
  deadline goes first.
- Of the sessions of one account, the session that has received the least goes first. Its second session comes
  after the first session of every other account.
- Prompts are read ahead only while no session waits for a tree.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from streamserve.draft_service.server.accounts import Account
from streamserve.draft_service.server.sessions import DraftedSequence, Session

DEFAULT_DEADLINE = 10.0
"""Default deadline, in seconds after the request."""
LEAD_BATCHES = 2.0
"""Number of batches by which a deadline may put an account ahead of another account."""
DEEPER_FACTOR = 2
MIN_DEEP_LEVELS = 8
"""A batch takes as long as its deepest tree. A session waits for a separate batch if its trees are deeper
than DEEPER_FACTOR times the deepest tree of the batch, and deeper than MIN_DEEP_LEVELS levels."""

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
    """Limits of one batch: the number of `targets`, the seconds if it has several targets, the nodes of all
    trees, and the `tokens` read. A batch that only reads ahead has the lower limit `read_ahead`: trees that
    are requested meanwhile wait until it ends."""

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
    """Return the sessions at the head of `ordered` that are drafted for in one batch: within `bounds`, and
    only while the batch takes less time than separate batches. At least the first session is taken, even
    beyond the bounds. A session's sequences beyond the bounds wait for the session's next batch."""
    chosen: list[Member] = []
    together: list[DraftedSequence] = []
    spent = 0.0
    nodes, tokens = bounds.nodes, bounds.tokens
    for session in ordered[: bounds.targets]:
        # Sequences with a token that is due come first, in the order of its time; then the least recently
        # used.
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
    """Return the first sequences of `waiting` that fit the limits of nodes and tokens. If `first`, return at
    least one sequence, as the batch would be empty otherwise."""
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
