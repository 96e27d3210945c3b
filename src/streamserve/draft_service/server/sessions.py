"""The sessions of a draft service, one for each target, and their sequences. Pure bookkeeping.

Nothing is shared between sessions: two targets with the same prompt have two sequences with separate blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from streamserve.draft_service.server.accounts import Account
from streamserve.draft_service.server.statistics import Mean
from streamserve.protocol.drafting import Delta, Draft
from streamserve.protocol.sampling import SamplingParams


@dataclass(eq=False)
class DraftedSequence:
    """A target's sequence, as its deltas describe it.

    tokens     ─────────────────────────┐
    read       ───────────────────┐         the drafter has read these tokens
    computed   ────────────┐                and has KV for these, in `blocks`

    `number` is the number of the last delta applied. `requested` is the delta that waits for a tree, and
    `answer` the tree of the last delta. While the sequence is `running`, a batch writes its blocks.
    """

    id: int
    """The id under which the drafter knows the sequence, unique over all sessions."""
    name: int
    """The id under which the target knows the sequence."""
    account: Account
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    """The known tokens. A running batch reads this list: it may only be appended to, or replaced."""
    epoch: int = 0
    number: int = 0
    read: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    requested: Delta | None = None
    answer: Draft | None = None
    running: bool = False
    stable_length: int = 0
    """While the sequence is running: the length of the prefix that has not been edited since the run
    began."""
    due: float | None = None
    """When the target's next token is due, if it has a target for the time per token."""
    dropped: bool = False
    used: float = 0.0
    stored_bytes: int = 0
    """The bytes that the storage limit counts for the sequence."""

    def apply(self, delta: Delta) -> bool:
        """Apply a delta that builds on the known tokens; return False if it is a repeat or comes too late."""
        if delta.number <= self.number:
            return False
        if delta.params is not None:
            self.params = delta.params
        old, new = self.tokens[delta.retained :], delta.tokens
        same = next((i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
        unchanged = delta.retained + (min(len(old), len(new)) if same is None else same)
        self.read, self.computed = min(self.read, unchanged), min(self.computed, unchanged)
        self.stable_length = min(self.stable_length, unchanged)
        if old:
            self.tokens = self.tokens[: delta.retained] + new
        else:
            self.tokens += new
        self.epoch, self.number = delta.epoch, delta.number
        self.answer = None
        self.set_request(delta)
        return True

    def set_request(self, delta: Delta | None) -> None:
        """Set the delta for which a tree is requested; None for none."""
        self.account.in_flight += (delta is not None) - (self.requested is not None)
        self.requested = delta

    @property
    def wants_tree(self) -> bool:
        """Whether a tree is requested. False if the drafter is only to read the sequence's tokens ahead."""
        return self.requested is not None and self.requested.depth > 0

    def begin(self, length: int) -> None:
        """Record that a batch reads the sequence's first `length` tokens, to draft after them."""
        self.running, self.stable_length, self.read = True, length, length

    def end(self) -> None:
        """Record that the batch has ended: the tokens that were not edited meanwhile have KV now."""
        self.running, self.computed = False, self.stable_length


@dataclass(eq=False)
class Session:
    """A target's session. `peer` is the last source of its messages, `key` the target's public key, if it
    has one. The session's resource use is counted in `account`. `nonce` is the nonce of the Hello that
    opened it."""

    tag: int
    channel: bytes
    peer: bytes
    key: str
    name: str
    account: Account
    opened: float
    heard: float
    nonce: int = 0
    disconnected: bool = False
    """Whether the target's connection has ended since the target was last heard."""
    sequences: dict[int, DraftedSequence] = field(default_factory=dict)
    virtual: float = 0.0
    """Seconds of drafting received: of the sessions of one account, the session with the least is served
    next."""
    requested_at: float | None = None
    """When the waiting request came; None if no request waits."""
    deadline: float | None = None
    served: float | None = None
    """When the session was last drafted for."""
    away_since: float | None = None
    """When the session's last trees were sent; None after its next request."""
    draft_alone: bool = False
    """Whether the session is drafted for alone, because a batch that contained it has failed."""
    failures: int = 0
    """Consecutive failures of batches in which this session was alone."""
    blocked_until: float = 0.0
    requests: int = 0
    trees: int = 0
    accepted: int = 0
    tested: int = 0
    depth: Mean = field(default_factory=Mean)
    plain: Mean = field(default_factory=Mean)
    """`depth`: mean number of levels of the session's trees; `plain`: mean seconds of the target's steps
    without draft tokens."""

    def waiting(self) -> list[DraftedSequence]:
        """Return the sequences that wait for the next batch. If a sequence waits for a tree, sequences that
        are only to be read ahead are left out."""
        waiting = [s for s in self.sequences.values() if s.requested is not None and not s.running]
        return [s for s in waiting if s.wants_tree] or waiting

    @property
    def wants_trees(self) -> bool:
        """Whether a sequence of the session waits for a tree, or is being drafted for."""
        return any(sequence.wants_tree for sequence in self.sequences.values())

    @property
    def due(self) -> float:
        """When the earliest token is due among the sequences that wait for a tree; inf if none of their
        tokens is due at a time."""
        return min((s.due for s in self.waiting() if s.wants_tree and s.due is not None), default=inf)


def accepted_tokens(answer: Draft, tokens: list[int]) -> tuple[int, int]:
    """Return the accepted draft tokens on the path that the target followed in a tree, and the number tested:
    the accepted ones, plus the first level without an accepted one."""
    if answer.tree is None:
        return 0, 0
    tree, node, accepted = answer.tree, 0, 0
    children: Mapping[tuple[int, int], int] = {
        (parent, token): child
        for child, (parent, token) in reversed(list(enumerate(zip(tree.parents, tree.tokens, strict=True))))
    }
    for token in tokens:
        following = children.get((node, token))
        if following is None:
            tested = node in tree.parents
            return accepted, accepted + tested
        node, accepted = following, accepted + 1
    return accepted, accepted
