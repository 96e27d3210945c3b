"""What a draft service knows of its targets: a session for each, and its sequences. Pure bookkeeping.

Nothing is shared between sessions: two targets with the same prompt have two sequences with blocks of their
own."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamserve.draft_service.server.accounts import Account
from streamserve.protocol.drafting import Delta, Draft
from streamserve.protocol.sampling import SamplingParams


@dataclass(eq=False)
class DraftedSequence:
    """A sequence of a target, as far as its deltas came.

    tokens     ─────────────────────────┐
    told       ───────────────────┐         the drafter has these tokens
    computed   ────────────┐                and KV for these, in `blocks`

    `number` is the last delta taken, `wanted` the one that is waiting for a tree, `answer` what the last one
    came to. While it is `running`, its blocks are being written.
    """

    id: int
    """What the drafter calls it: unique over all sessions."""
    name: int
    """What its target calls it."""
    account: Account
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    epoch: int = 0
    number: int = 0
    told: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    wanted: Delta | None = None
    answer: Draft | None = None
    running: bool = False
    cut: int = 0
    """Since it runs, at most its first so many tokens were left as they were."""
    gone: bool = False
    used: float = 0.0
    held: int = 0
    """Bytes that it is counted as."""

    def take(self, delta: Delta) -> bool:
        """Go on by a delta that builds on what is known; false if it has come before or comes too late."""
        if delta.number <= self.number:
            return False
        if delta.params is not None:
            self.params = delta.params
        old, new = self.tokens[delta.keep :], delta.tokens
        same = next((i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
        kept = delta.keep + (min(len(old), len(new)) if same is None else same)
        self.told, self.computed = min(self.told, kept), min(self.computed, kept)
        self.cut = min(self.cut, kept)
        self.tokens[delta.keep :] = new
        self.epoch, self.number = delta.epoch, delta.number
        self.answer = None
        self.want(delta)
        return True

    def want(self, delta: Delta | None) -> None:
        """From now on a tree is wanted for `delta`, or none."""
        self.account.in_flight += (delta is not None) - (self.wanted is not None)
        self.wanted = delta

    def begin(self, length: int) -> None:
        """From now on its first `length` tokens are being read, and then guessed behind."""
        self.running, self.cut, self.told = True, length, length

    def end(self) -> None:
        """They have been read: as far as they still hold, there is KV for them."""
        self.running, self.computed = False, self.cut


@dataclass(eq=False)
class Session:
    """A target. `peer` is where its messages last came from; `key` the public key it showed, if it did; what
    it uses is counted in its `account`. `nonce` is that of the Hello which opened it."""

    tag: int
    channel: bytes
    peer: bytes
    key: str
    name: str
    account: Account
    opened: float
    heard: float
    nonce: int = 0
    cut: bool = False
    """Whether its connection has ended since it was heard."""
    sequences: dict[int, DraftedSequence] = field(default_factory=dict)
    virtual: float = 0.0
    """Seconds it was drafted for: of one account's sessions the one with the least is served next."""
    asked: float | None = None
    """When the request came that is waiting."""
    deadline: float | None = None
    served: float | None = None
    """When it was last drafted for."""
    away_since: float | None = None
    """Since when it has had trees and not asked again."""
    apart: bool = False
    """Whether it is drafted for alone, as a batch with it in it has failed."""
    failures: int = 0
    """Batches for it alone that failed, one after another."""
    barred_until: float = 0.0
    asks: int = 0
    trees: int = 0
    accepted: int = 0
    guessed: int = 0

    def waiting(self) -> list[DraftedSequence]:
        """Sequences that want a tree and are not being drafted for."""
        return [one for one in self.sequences.values() if one.wanted is not None and not one.running]


def accepted_guesses(answer: Draft, tokens: list[int]) -> tuple[int, int]:
    """Of the guesses on the way that the target went after a tree: how many were right, and how many were
    tested (those, and the first level that had none right)."""
    if answer.tree is None:
        return 0, 0
    tree, node, right = answer.tree, 0, 0
    children: Mapping[tuple[int, int], int] = {
        (parent, token): child
        for child, (parent, token) in reversed(list(enumerate(zip(tree.parents, tree.tokens, strict=True))))
    }
    for token in tokens:
        following = children.get((node, token))
        if following is None:
            tested = node in tree.parents
            return right, right + tested
        node, right = following, right + 1
    return right, right
