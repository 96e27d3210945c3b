"""The choice of a draft service for a sequence, as a pure function of measured values.

At service i, a sequence with R more tokens to come ends after

    R·(t_v + w_i + r_i + s_i(n_i + 1)) / (1 + ρ·a_i)  +  c_i·L   seconds.

- t_v: the target's verification.
- w: the queue; r: the round trip.
- s(n): the service's drafting for n sequences of this target.
- a: the mean number of accepted tokens in a tree of the service's draft model.
- ρ: accepted tokens of this sequence's trees, relative to other sequences.
- c·L: reading the L tokens of the sequence; 0 for the service that drafts for it now.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MOVE_SHARE = 0.8
"""A sequence moves to another service if its remaining seconds there are at most this share of its remaining
seconds at the present service."""
EQUAL = 1.1
"""Services whose seconds are within this factor of the least count as equal: load decides."""
MIN_DRAFT_SHARE = 0.5
"""Drafting for fewer sequences takes at least this share of the measured seconds."""
PRIOR_TREES, OPTIMISM, PRIOR_ACCEPTED = 4.0, 1.5, 2.0
"""Prior for the accepted tokens of a tree: OPTIMISM times the best measured service, or PRIOR_ACCEPTED before
any service is measured. It counts as much as PRIOR_TREES trees. The prior is optimistic so that every service
is tried."""


@dataclass(frozen=True)
class MeasuredService:
    """A service that may draft, as this target measures it; all times in seconds.

    - `number`: the number of its link.
    - `batch`: the time of a batch with `trees` trees of this target; `per_tree`: the additional time of each
      further tree.
    - `read`: the time to read one token of a prompt.
    - `accepted`: accepted tokens to expect of a tree.
    - `sequences`: sequences of this target that it drafts for; `active`: all targets that it drafts for.
    - `available_in`: the time until it accepts requests; `max_length`: the maximum length of a sequence, in
      tokens.
    - `rank`: decides between equal services; it differs between targets.
    """

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
        """Return the seconds until trees for `sequences` sequences of this target arrive."""
        draft = self.batch + self.per_tree * (sequences - self.trees)
        return self.queue + self.round_trip + max(draft, MIN_DRAFT_SHARE * self.batch)


@dataclass(frozen=True)
class PlacedSequence:
    """A sequence of `length` tokens with `remaining` more expected. `service` is the service that drafts for
    it, or None. `ratio` compares the accepted tokens of its trees with other sequences."""

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
    """Return the number of the service that should draft for a sequence. The sequence stays at its service
    unless another is better by more than the move costs, and by a margin. `services` must not be empty."""
    seconds = {service.number: seconds_at(service, sequence, verify) for service in services}
    least = min(seconds.values())
    if sequence.service in seconds and least > MOVE_SHARE * seconds[sequence.service]:
        return sequence.service
    equal = [service for service in services if seconds[service.number] <= EQUAL * least]
    return min(equal, key=lambda service: (service.sequences, service.active, service.rank)).number


def expected_acceptance(verified: Sequence[tuple[float, float]]) -> list[float]:
    """Return the accepted tokens to expect of a tree, for each service. `verified` holds, for each service,
    the number of its verified trees and their accepted tokens."""
    known = [accepted / trees for trees, accepted in verified if trees >= 1.0]
    prior = OPTIMISM * max(known) if known else PRIOR_ACCEPTED
    return [(accepted + PRIOR_TREES * prior) / (trees + PRIOR_TREES) for trees, accepted in verified]
