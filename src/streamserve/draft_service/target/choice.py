"""The choice of a target among its draft services: the *current* one drafts for all its sequences."""

import logging
import random
from collections.abc import Sequence

from streamserve.draft_service.target.links import Link

logger = logging.getLogger(__name__)

SWITCH_RATIO = 0.5
"""The current service is changed if another is expected to take at most this share of its answer time ..."""
SWITCH_CHECKS = 3
"""... in this many checks in a row."""
SWITCH_CHECK_SECONDS = 0.5


class ServiceChoice:
    """The choice among `links`. `rng` makes targets choose differently among equal services."""

    def __init__(self, links: Sequence[Link], rng: random.Random) -> None:
        self.current: Link | None = None
        self.moves = 0
        """How often the current service was left for a better one."""
        self._links = links
        self._random = rng
        self._checked_at = 0.0
        self._better_checks = 0

    def update(self, now: float) -> None:
        """Change the current service if it fails or another is clearly better."""
        if self.current is not None and not self.current.usable(now):
            logger.info("the draft service at %s no longer answers", self.current.address)
            self.current = None
        usable = [link for link in self._links if link.usable(now)]
        if not usable:
            return
        best = min(usable, key=lambda link: (link.times.expected, link.active, self._random.random()))
        if self.current is None:
            self.current, self._better_checks = best, 0
            return
        if now - self._checked_at < SWITCH_CHECK_SECONDS:
            return
        self._checked_at = now + self._random.random() * SWITCH_CHECK_SECONDS
        better = best is not self.current and best.times.expected < SWITCH_RATIO * self.current.times.expected
        self._better_checks = self._better_checks + 1 if better else 0
        if self._better_checks >= SWITCH_CHECKS:
            logger.info("switching from draft service %s to %s", self.current.address, best.address)
            self.moves += 1
            self.current, self._better_checks = best, 0

    def leave(self) -> None:
        """Leave the current service, without another one yet."""
        self.current = None
