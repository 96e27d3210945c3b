"""Quarantine of requests that may crash any worker that computes them; trials find out which request does.

    lost step ── suspects ──▶ groups ──▶ trial: a group alone on its workers ──▶ died: halves, next in line
                                          │                                  └─▶ died alone: one try less
                                          └──▶ new tokens of each, or its end: cleared

A trial is exclusive: nothing else is sent to its workers, so a death in it is the group's. At most one trial
runs at a time. When a group dies, the other groups of the same split are released: one explanation is enough.
If a cleared request becomes a suspect again and is tried alone, only its end clears it: its fault depends on
co-batched requests.

A worker that was asked to end (SIGTERM) says nothing about its requests. The requests of a worker that was
killed become suspects too. But unless the kernel killed it for lack of memory, a person may have: then a
request is refused only after it was alone at `MAX_KILLS` such deaths.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count

from streamserve.fleet.events import Ending
from streamserve.fleet.requests import OpenRequest

UNEXPLAINED = 3
"""A request also becomes a suspect after this many deaths of its worker outside any step."""

CLEARED = 3
"""If each suspect of a lost step has been cleared this many times, all requests at the worker become
suspects."""

MAX_KILLS = 6
"""A request is refused after this many unexplained SIGKILLs of its worker while it was there alone."""

MAX_STRIKES = 32
"""A request is refused after this many lost steps: more than twice the number that halving the largest batch
takes."""

TRIAL_SECONDS = 10.0
"""A trial that lasts longer is suspended if requests wait, for the time that it has lasted. Its next turn may
last twice as long."""


@dataclass(frozen=True)
class Group:
    """Suspects that are tried together. The groups of one `split` are alternative explanations of a death.
    `turns` counts the suspensions of its trial."""

    members: tuple[str, ...]
    split: int
    turns: int = 0


@dataclass
class Trial:
    """A group on trial at `workers` since a time. `pending` members have not been cleared yet."""

    group: Group
    workers: frozenset[str]
    pending: set[str]
    since: float

    @property
    def alone(self) -> bool:
        """Whether only one request is on trial."""
        return len(self.group.members) == 1

    def overdue(self, now: float) -> bool:
        """Return whether the trial should give way to requests that wait."""
        limit: float = TRIAL_SECONDS * 2**self.group.turns
        return now - self.since > limit


@dataclass
class Quarantine:
    """All suspects of one fleet. A request that ended its worker `max_tries` times alone is refused.
    `candidate_of` returns the route candidate that contains a worker."""

    candidate_of: Callable[[str], frozenset[str]]
    max_tries: int
    trial: Trial | None = None
    workers: frozenset[str] = frozenset()
    """The workers on which trials are held; empty without suspects."""
    suspected: int = 0
    """The number of times a request became a suspect so far."""
    recess_until: float = 0.0
    """No trial is held before this time, because other requests had waited for long."""
    _groups: deque[Group] = field(default_factory=deque)
    _splits: "count[int]" = field(default_factory=count)

    def __len__(self) -> int:
        """Return the number of present suspects."""
        tried = len(self.trial.pending) if self.trial else 0
        return tried + sum(len(group.members) for group in self._groups)

    def waits(self, name: str) -> bool:
        """Return whether a request is a suspect whose trial has not begun."""
        return any(name in group.members for group in self._groups)

    def reserved(self, now: float) -> frozenset[str]:
        """Return the workers that other requests must not be sent to."""
        if self.trial or (self._groups and now >= self.recess_until):
            return self.workers
        return frozenset()

    def worker_died(
        self,
        worker: str,
        affected: Sequence[OpenRequest],
        suspects: frozenset[int] | None,
        ending: Ending = "fault",
    ) -> tuple[bool, list[OpenRequest]]:
        """Process the death of a worker. `affected` requests depended on it. `suspects` are the attempts in
        the lost step, None if unknown. Return whether a request is blamed, and the requests to refuse."""
        tried = self.trial if self.trial and worker in self.trial.workers else None
        # Asked to end, so its requests are not at fault: an interrupted trial is repeated.
        if ending == "outside":
            if tried:
                self.trial = None
                self._put_back(tried, tried.group.turns)
            return False, []
        named = [r for r in affected if suspects is None or r.attempt in suspects]
        if tried:
            return self._trial_died(tried, affected, named, ending)
        # It died outside any step. A request that this happens to repeatedly becomes a suspect all the same.
        if not named:
            for request in affected:
                request.suspicion.unexplained += 1
            named = [request for request in affected if request.suspicion.unexplained >= UNEXPLAINED]
        if not named:
            return False, []
        if min(request.suspicion.cleared for request in named) >= CLEARED:
            # All suspects were cleared before: the cause is a request outside the lost step.
            named = list(affected)
        self.workers = self.workers or self.candidate_of(worker)
        convicted = self._strike(named, ending, alone=ending == "unclear" and len(affected) == 1)
        self._groups.extend(self._split([r for r in named if r not in convicted]))
        return True, convicted

    def next(self, alive: Collection[str]) -> Group | None:
        """Return the next group to try, without members that are no longer `alive` (open); None if no group
        is left."""
        if self.trial is not None:
            return None
        while self._groups:
            group = self._groups.popleft()
            members = tuple(name for name in group.members if name in alive)
            if members:
                self._groups.appendleft(Group(members, group.split, group.turns))
                return self._groups[0]
        self.workers = frozenset()
        return None

    def begin(self, workers: frozenset[str], now: float) -> Trial:
        """Begin the trial of the next group on `workers`."""
        group = self._groups.popleft()
        self.workers = workers
        self.trial = Trial(group, workers, set(group.members), now)
        return self.trial

    def suspend(self, now: float) -> tuple[str, ...]:
        """Interrupt the running trial so that other requests are served. No trial begins for as long as this
        one has run; then its group is tried again. Return the names of the group's requests."""
        assert self.trial is not None
        trial, self.trial = self.trial, None
        self._put_back(trial, trial.group.turns + 1)
        self.recess_until = now + (now - trial.since)
        return trial.group.members

    def progressed(self, request: OpenRequest) -> None:
        """Record progress of a request: tokens were decoded, or a part of its prompt stream was computed."""
        trial = self.trial
        if trial is None or request.name not in trial.pending:
            return
        # Cleared before, and a suspect again: its fault depends on co-batched requests, which a trial lacks.
        if trial.alone and request.suspicion.cleared and not request.opened.open:
            return
        request.suspicion.cleared += 1
        request.suspicion.tries = request.suspicion.killed_alone = 0
        self.clear(request.name)

    def clear(self, name: str) -> None:
        """Record that a request is cleared or over."""
        if self.trial is not None:
            self.trial.pending.discard(name)
            if not self.trial.pending:
                self.trial = None

    def moves(self, workers: frozenset[str]) -> None:
        """Set the workers on which further trials are held."""
        if self.workers:
            self.workers = workers

    def _put_back(self, trial: Trial, turns: int) -> None:
        """Put the group of an interrupted trial back, first in line."""
        pending = tuple(name for name in trial.group.members if name in trial.pending)
        self._groups.appendleft(Group(pending, trial.group.split, turns))

    def _trial_died(
        self, trial: Trial, affected: Sequence[OpenRequest], named: Sequence[OpenRequest], ending: Ending
    ) -> tuple[bool, list[OpenRequest]]:
        """Process a death in a trial: blame its members that were in the lost step, else all members."""
        self.trial = None
        members = [request for request in affected if self._in(trial.group, request)]
        pending = [request for request in members if request.name in trial.pending]
        accused = [r for r in pending if r in named] or [r for r in members if r in named] or members
        if not accused:
            return False, []
        # Groups of one split explain the same death, and one explanation is enough.
        self._groups = deque(group for group in self._groups if group.split != trial.group.split)
        convicted = self._strike(accused, ending, trial.alone)
        self._groups.extendleft(reversed(self._split([r for r in accused if r not in convicted])))
        return True, convicted

    def _in(self, group: Group, request: OpenRequest) -> bool:
        return request.name in group.members

    def _strike(self, requests: Sequence[OpenRequest], ending: Ending, alone: bool) -> list[OpenRequest]:
        """Count a lost step against `requests`; return the requests to refuse. `alone`: it was one request,
        and no other was at the worker."""
        unclear = ending == "unclear"
        for request in requests:
            suspicion = request.suspicion
            suspicion.strikes += 1
            suspicion.killed += unclear
            suspicion.killed_alone += unclear and alone
            suspicion.tries += alone and not unclear
            suspicion.unexplained = 0
            self.suspected += not request.isolated
            request.isolated = True
        return [request for request in requests if self._is_convicted(request)]

    def _is_convicted(self, request: OpenRequest) -> bool:
        """Return whether a request is to be refused."""
        suspicion = request.suspicion
        return (
            suspicion.tries >= self.max_tries
            or suspicion.killed_alone >= MAX_KILLS
            or suspicion.strikes - suspicion.killed >= MAX_STRIKES
        )

    def _split(self, requests: Sequence[OpenRequest]) -> list[Group]:
        """Split suspects into two groups. The first group has the requests with the most lost steps, if these
        are at most half of all; otherwise both groups are halves."""
        if not requests:
            return []
        ranked = sorted(requests, key=lambda request: -request.suspicion.strikes)
        top = sum(request.suspicion.strikes == ranked[0].suspicion.strikes for request in ranked)
        half = top if top <= len(ranked) // 2 else -(-len(ranked) // 2)
        split = next(self._splits)
        parts = (ranked[:half], ranked[half:])
        return [Group(tuple(r.name for r in part), split) for part in parts if part]
