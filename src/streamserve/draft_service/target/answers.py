"""Validation of a draft service's answers by the target: a service is another party, and may be broken or
hostile.

A wrong answer is dropped and counted. A service that gives several in a short time is put on probation: its
connection is closed, and it is tried again after a time that doubles each time.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from streamserve.contracts.tree import TokenTree
from streamserve.protocol.drafting import Busy, Delta, Drafts, Pong, ToTarget, Tree, Welcome
from streamserve.system.token_bucket import TokenBucket

Fault = Literal["unreadable", "tree", "foreign", "timing", "lost", "flood", "internal"]
"""Faults of an answer:

- unreadable: it cannot be decoded.
- tree: its tree does not fit the request.
- foreign: it answers something that was never requested.
- timing: its times are impossible.
- lost: it loses a sequence repeatedly.
- flood: it exceeds the rate limits for answers.
- internal: processing it failed on this side.
"""

STRIKES = 3
STRIKE_SECONDS = 60.0
"""This many wrong answers in this many seconds put a service on probation."""
FIRST_PROBATION, LONGEST_PROBATION = 10.0, 600.0
"""Seconds of the first probation, and of the longest. Each probation is twice as long as the one before."""
LONGEST_SECONDS = 3600.0
"""Upper bound of the durations in an answer, in seconds."""
OVER_ONE = 1.001
"""Scores are rounded in transit: the largest value that is accepted as one."""
LOST_IN_A_ROW = 8
"""How many times in a row a sequence may be reported as lost without a tree for it."""
ANSWERS_A_SECOND = 5000.0
BYTES_A_SECOND = 64.0 * (1 << 20)


@dataclass
class Reputation:
    """A target's record of a service's wrong answers."""

    until: float = float("-inf")
    """When the service's probation ends."""
    probations: int = 0
    _strikes: deque[float] = field(default_factory=lambda: deque(maxlen=STRIKES))
    _next: float = FIRST_PROBATION

    def strike(self, now: float, certain: bool = False) -> bool:
        """Count a wrong answer; return whether it puts the service on probation. If the fault is `certain`,
        one answer is enough."""
        self._strikes.append(now)
        often = len(self._strikes) == STRIKES and now - self._strikes[0] <= STRIKE_SECONDS
        if not (often or certain):
            return False
        if now - self.until > 4 * LONGEST_PROBATION:
            self._next = FIRST_PROBATION  # the last probation was long ago
        self._strikes.clear()
        self.until = now + self._next
        self._next = min(2.0 * self._next, LONGEST_PROBATION)
        self.probations += 1
        return True


class Flood:
    """Rate limits for the answers of a service, higher than any honest one needs."""

    def __init__(self) -> None:
        self._answers = TokenBucket(ANSWERS_A_SECOND, 2 * ANSWERS_A_SECOND, 0.0)
        self._bytes = TokenBucket(BYTES_A_SECOND, 2 * BYTES_A_SECOND, 0.0)

    def over(self, size: int, now: float) -> bool:
        """Return whether a message of `size` bytes exceeds the limits."""
        if self._answers.wait(1.0, now) or self._bytes.wait(size, now):
            return True
        self._answers.level -= 1.0
        self._bytes.level -= size
        return False


def timing_error(message: ToTarget) -> str:
    """Return why a message's times are impossible; "" if they are possible."""
    match message:
        case Drafts():
            seconds: Sequence[float] = (message.waited, message.seconds, message.queue)
        case Pong():
            seconds = (message.queue, message.seconds)
        case Busy():
            seconds = (message.retry,)
        case Welcome():
            seconds = (message.lease,)
        case _:
            return ""
    bad = [value for value in seconds if not 0.0 <= value <= LONGEST_SECONDS]  # rejects NaN too
    if bad:
        return f"{bad[0]} seconds are out of range"
    if isinstance(message, Pong) and not (math.isfinite(message.sent) and message.active >= 0):
        return "it does not answer a ping"
    return ""


def validated_tree(tree: Tree, root: int, delta: Delta, vocabulary: int) -> TokenTree:
    """Return the tree of an answer to `delta`, whose last token was `root`. Raises ValueError if an honest
    service would not send it for a target with `vocabulary` tokens."""
    size = len(tree.tokens)
    if not 1 <= size <= delta.nodes + 1:
        raise ValueError(f"it has {size - 1} nodes, {delta.nodes} were requested")
    if tree.tokens[0] != root:
        raise ValueError("its root is another token")
    if min(tree.tokens) < 0 or max(tree.tokens) >= vocabulary:
        raise ValueError(f"the vocabulary has {vocabulary} tokens")
    for shares in (tree.scores, tree.accept):
        if not all(0.0 <= share <= OVER_ONE for share in shares):
            raise ValueError("a score is not between 0 and 1")
    checked_tree = TokenTree(
        tree.tokens,
        tree.parents,
        tuple(min(score, 1.0) for score in tree.scores),
        tuple(min(share, 1.0) for share in tree.accept),
    ).check()
    if max(checked_tree.depths()) > delta.depth:
        raise ValueError(f"it has {max(checked_tree.depths())} levels, {delta.depth} were requested")
    if len(set(zip(tree.parents, tree.tokens, strict=True))) < size:
        raise ValueError("two children of a node are the same")
    return checked_tree
