"""The choice of a draft service for a sequence, as a pure function of measured values.

At service i, a sequence with R more tokens to come ends after

    R·(t_v + w_i + r_i + s_i(n_i + 1)) / (1 + ρ·a_i)  +  c_i·L   seconds.

t_v is the target's verification; w the queue, r the round trip, and s(n) the drafting for n sequences of this
target at the service; a the accepted tokens of a tree of its draft model, and ρ how much better than others
the sequence's are accepted. c·L is the reading of its L tokens, which only another service than its present
one has to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MOVE_SHARE = 0.8
"""A sequence moves if it ends elsewhere in at most this share of the seconds that remain where it is."""
EQUAL = 1.1
"""Services whose seconds are within this factor of the least count as equal: load decides."""
MIN_DRAFT_SHARE = 0.5
"""Drafting for fewer sequences takes at least this share of the measured seconds."""
PRIOR_TREES, OPTIMISM, PRIOR_ACCEPTED = 4.0, 1.5, 2.0
"""A service without verified trees is taken to be this much better than the best measured one, or to have so
many accepted tokens a tree, until it has drafted this many trees: so each is tried."""


@dataclass(frozen=True)
class MeasuredService:
    """A service that may draft, as this target measures it; all times in seconds. A batch with `trees` trees
    of this target takes `batch`, each more `per_tree`; reading takes `read` a token. It drafts for
    `sequences` of this target, and for `active` targets. It accepts requests after `available_in`, for up to
    `max_length` tokens. `rank` differs between targets, and decides between equal ones."""

    number: int
    queue: float
    round_trip: float
    batch: float
    trees: float
    per_tree: float
    read: float
    accepted: float
    sequences: int = 0
    active: int = 0
    available_in: float = 0.0
    max_length: int = 1 << 30
    rank: int = 0

    def answer_seconds(self, sequences: int) -> float:
        """Return the seconds until trees for so many sequences of this target arrive."""
        draft = self.batch + self.per_tree * (sequences - self.trees)
        return self.queue + self.round_trip + max(draft, MIN_DRAFT_SHARE * self.batch)


@dataclass(frozen=True)
class PlacedSequence:
    """A sequence of `length` tokens, with `remaining` more expected, at a service or at none yet. Its trees
    are accepted `ratio` times as well as others."""

    service: int | None
    length: int
    remaining: float
    ratio: float = 1.0


def seconds_at(service: MeasuredService, sequence: PlacedSequence, verify: float) -> float:
    """Return the seconds until a sequence ends if it is drafted for at a service from now on."""
    there = sequence.service == service.number
    step = verify + service.answer_seconds(service.sequences + (not there))
    move = 0.0 if there else service.read * sequence.length
    tokens = 1.0 + sequence.ratio * service.accepted
    return sequence.remaining * step / tokens + service.available_in + move


def choose(services: Sequence[MeasuredService], sequence: PlacedSequence, verify: float) -> int:
    """Return the number of the service, of one or more, that is to draft for a sequence. It stays where it is
    unless another is better by more than the move costs, and by a margin."""
    seconds = {service.number: seconds_at(service, sequence, verify) for service in services}
    least = min(seconds.values())
    if sequence.service in seconds and least > MOVE_SHARE * seconds[sequence.service]:
        return sequence.service
    equal = [service for service in services if seconds[service.number] <= EQUAL * least]
    return min(equal, key=lambda service: (service.sequences, service.active, service.rank)).number


def expected_acceptance(verified: Sequence[tuple[float, float]]) -> list[float]:
    """Return the accepted tokens to expect of a tree of each service, from its verified trees and their
    accepted tokens."""
    known = [accepted / trees for trees, accepted in verified if trees >= 1.0]
    prior = OPTIMISM * max(known) if known else PRIOR_ACCEPTED
    return [(accepted + PRIOR_TREES * prior) / (trees + PRIOR_TREES) for trees, accepted in verified]
