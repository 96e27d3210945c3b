"""The draft service of each sequence of a target. A sequence stays at its service unless another is better by
more than the move costs, or the service fails."""

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil

from streamserve.draft_service.target.choice import (
    MeasuredService,
    PlacedSequence,
    choose,
    expected_acceptance,
)
from streamserve.draft_service.target.links import ServiceLink
from streamserve.draft_service.target.measures import BatchTimes
from streamserve.draft_service.target.synced import SyncedSequence

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.5
"""Seconds between two checks whether sequences should move; a random part of it is added."""
MOVE_CHECKS = 3
"""A sequence moves if another service is better in this many checks in a row."""
MOVED_SHARE = 0.25
"""Largest share of the sequences that move after one check: the next check measures the effect."""
ACTIVE_SECONDS = 2.0
"""A sequence counts as load of its service for this long after its latest request."""
MIN_REMAINING = 32.0
"""Minimum of the output tokens that a sequence is expected to add. An output longer than this is expected to
double."""
ASSUMED_READ = 2e-4
"""Seconds to read one token, until reading is measured at any service."""


class ServicePlacement:
    """Places sequences at the services of `links`. `rng` makes targets choose differently among equal
    services."""

    def __init__(self, links: Sequence[ServiceLink], rng: random.Random) -> None:
        self.moves = 0
        """How often a sequence left a service for a better one."""
        self._links = links
        self._ranks = rng.sample(range(len(links)), len(links))
        self._random = rng
        self._checked_at = 0.0
        self._tags = [0] * len(links)

    def place(
        self, ids: Iterable[int], sequences: Mapping[int, SyncedSequence], now: float, verify: float
    ) -> None:
        """Choose a service for each sequence of `ids` that has no service, or whose service accepts no
        requests now."""
        new = [id for id in ids if not self._usable(sequences[id], now)]
        if not new:
            return
        services = self.measured(sequences, now)
        for id in new:
            sequence = sequences[id]
            possible = [s for s in fitting(services, sequence) if _accepts(s, sequence)]
            if possible:
                number = choose(possible, placed(sequence), verify)
                if number != sequence.service:
                    self._put(id, sequence, number, now)
                    services = _counted(services, number)

    def check(self, sequences: Mapping[int, SyncedSequence], now: float, verify: float) -> None:
        """Move sequences for which another service has been better in MOVE_CHECKS checks in a row."""
        if len(self._links) < 2 or now - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = now + self._random.random() * CHECK_SECONDS
        services = [service for service in self.measured(sequences, now) if not service.available_in]
        active = {
            id: sequence
            for id, sequence in sequences.items()
            if self._usable(sequence, now) and now - sequence.active_at < ACTIVE_SECONDS
        }
        allowed = ceil(MOVED_SHARE * len(active))
        # Short sequences first: the other service has fewer tokens to read again.
        for id, sequence in sorted(active.items(), key=lambda item: item[1].length):
            number, present = choose(fitting(services, sequence), placed(sequence), verify), sequence.service
            sequence.better_checks = sequence.better_checks + 1 if number != present else 0
            if sequence.better_checks >= MOVE_CHECKS and allowed and present is not None:
                allowed -= 1
                self.moves += 1
                self._put(id, sequence, number, now)
                services = _counted(services, number, present)

    def leave_closed(self, sequences: Mapping[int, SyncedSequence], now: float) -> None:
        """Reset sequences whose service no longer accepts requests, so that they are synced again. A sequence
        also loses its service if the session has ended."""
        tags = [link.tag if link.usable(now) else 0 for link in self._links]
        if tags == self._tags:
            return
        for link, before, tag in zip(self._links, self._tags, tags, strict=True):
            if not before or before == tag:
                continue
            there = [sequence for sequence in sequences.values() if sequence.service == link.number]
            if not link.open and there:
                logger.info("%d sequences leave the draft service at %s", len(there), link.address)
            for sequence in there:
                sequence.reset()
                if link.tag != before:
                    sequence.service = None
        self._tags = tags

    def measured(self, sequences: Mapping[int, SyncedSequence], now: float) -> list[MeasuredService]:
        """Return the measured values of the services with an open session."""
        links = [link for link in self._links if link.open]
        counts = [0] * len(self._links)
        for sequence in sequences.values():
            if sequence.service is not None and now - sequence.active_at < ACTIVE_SECONDS:
                counts[sequence.service] += 1
        accepted = expected_acceptance([link.acceptance.at(now) for link in links])
        known = [batch for link in links if (batch := link.times.batch_now(now)).seconds]
        fastest = min(known, key=lambda batch: batch.seconds, default=BatchTimes())
        reads = [link.times.read for link in links if link.times.read]
        read = sum(reads) / len(reads) if reads else ASSUMED_READ
        return [
            self._measured(link, tokens, fastest, read, counts[link.number], now)
            for link, tokens in zip(links, accepted, strict=True)
        ]

    def _measured(
        self, link: ServiceLink, accepted: float, fastest: BatchTimes, read: float, sequences: int, now: float
    ) -> MeasuredService:
        """Return the measured values of a service; `fastest` and `read` replace values that are unknown."""
        batch = link.times.batch_now(now)
        if not batch.seconds:
            batch = fastest
        return MeasuredService(
            number=link.number,
            queue=link.times.queue,
            round_trip=link.times.round_trip,
            batch=batch.seconds,
            trees=batch.trees,
            per_tree=batch.per_tree,
            read=link.times.read or read,
            accepted=accepted,
            sequences=sequences,
            active=link.active,
            available_in=max(link.busy_until - now, 0.0),
            max_length=link.max_model_len,
            rank=self._ranks[link.number],
        )

    def _usable(self, sequence: SyncedSequence, now: float) -> bool:
        if sequence.service is None:
            return False
        link = self._links[sequence.service]
        return link.usable(now) and sequence.reach <= link.max_model_len

    def _put(self, id: int, sequence: SyncedSequence, number: int, now: float) -> None:
        """Let a service draft for a sequence; the service gets the sequence from its first token."""
        if sequence.service is not None:
            self._links[sequence.service].abandon([id])
        self._links[number].resume(id)
        sequence.reset()
        sequence.service, sequence.active_at, sequence.better_checks = number, now, 0


def fitting(services: Sequence[MeasuredService], sequence: SyncedSequence) -> list[MeasuredService]:
    """Return the services whose draft model has a context that is long enough for a sequence."""
    return [service for service in services if sequence.reach <= service.max_length]


def placed(sequence: SyncedSequence) -> PlacedSequence:
    """Return the properties of a sequence on which the choice of its service depends."""
    remaining = max(float(sequence.output), MIN_REMAINING)
    if sequence.params.max_tokens is not None:
        remaining = min(remaining, float(max(sequence.params.max_tokens - sequence.output, 1)))
    return PlacedSequence(sequence.service, sequence.length, remaining, sequence.ratio)


def _accepts(service: MeasuredService, sequence: SyncedSequence) -> bool:
    """Return whether a sequence may be placed at a service. It may wait for a busy service only if it is
    there already."""
    return not service.available_in or service.number == sequence.service


def _counted(services: list[MeasuredService], added: int, left: int | None = None) -> list[MeasuredService]:
    """Return the services with updated numbers of sequences, after a sequence moved from service `left` to
    service `added`."""
    return [
        replace(service, sequences=service.sequences + (service.number == added) - (service.number == left))
        for service in services
    ]
