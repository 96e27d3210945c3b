"""Workers that are added and removed while a fleet serves.

    AddWorkers    ──▶ Start; placed on once they are ready
    RemoveWorkers ──▶ draining ── no request, no transfer ──▶ gone: Retire
                         └── time is up: their requests continue elsewhere ──┘

Invalid changes are refused earlier, by `after_adding` and `after_removing`.
"""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from streamserve.fleet.adapters import AdapterBook
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.dispatcher import Dispatcher
from streamserve.fleet.events import AddWorkers, RemoveWorkers
from streamserve.fleet.kv_transfers import KVTransfers
from streamserve.fleet.placement import Placement
from streamserve.fleet.quarantine import Quarantine
from streamserve.fleet.supervisor import WorkerSupervisor
from streamserve.fleet.worker_state import Topology
from streamserve.protocol.config import Role
from streamserve.protocol.errors import RequestError

AddedRole = Literal["unified", "prefill", "decode", "pair"]
PAIR = "pair"
PAIR_ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class Removal:
    """The workers that are to leave, and the number of their open requests."""

    workers: tuple[str, ...]
    open_requests: int


@dataclass(frozen=True)
class Leaving:
    """Workers that leave together. Requests that they still have at the time `until` continue at other
    workers."""

    workers: frozenset[str]
    until: float


class Scaling:
    """The changes of a fleet's workers."""

    def __init__(
        self,
        config: FleetConfig,
        supervisor: WorkerSupervisor,
        dispatcher: Dispatcher,
        transfers: KVTransfers,
        placement: Placement,
        quarantine: Quarantine,
        adapters: AdapterBook,
    ) -> None:
        self.added = self.removed = self.moved = 0
        """Counts since the start: workers added, workers removed, and requests that were moved because their
        worker's time to leave was up."""
        self._config = config
        self._supervisor = supervisor
        self._availability = supervisor.availability
        self._workers = supervisor.workers
        self._dispatcher = dispatcher
        self._transfers = transfers
        self._placement = placement
        self._quarantine = quarantine
        self._adapters = adapters
        self._leaving: list[Leaving] = []

    def free_names(self, role: AddedRole, count: int) -> tuple[str, ...]:
        """Return the names of `count` new workers of a role, or of `count` pairs."""
        roles = PAIR_ROLES if role == PAIR else (role,)
        names: list[str] = []
        number = 0
        while len(names) < count * len(roles):
            new = [f"{each}-{number}" for each in roles]
            names += [] if any(name in self._workers for name in new) else new
            number += 1
        return tuple(names)

    def named(self, name: str) -> tuple[str, ...]:
        """Return the workers that a name means: pair-N is prefill-N and decode-N. Raises RequestError (404)
        if there are none."""
        role, _, number = name.rpartition("-")
        names = tuple(f"{each}-{number}" for each in PAIR_ROLES) if role == PAIR else (name,)
        if not any(each in self._workers for each in names):
            raise self._unknown(name)
        return names

    def _unknown(self, name: str) -> RequestError:
        there = ", ".join(self._workers)
        return RequestError(f"there is no worker {name!r}; there are {there}", status=404)

    def after_adding(self, names: Collection[str]) -> Topology:
        """Return the topology with further workers. Raises RequestError if they cannot be added."""
        if refusal := self._add_refusal(names):
            raise refusal
        try:
            return self._availability.remaining.joined_by(names)
        except ValueError:
            message = f"{', '.join(names)} cannot serve without its other half: add a pair"
            raise RequestError(message, status=409) from None

    def after_removing(self, names: Collection[str]) -> Topology:
        """Return the topology without `names` and without the workers that are leaving already. Raises
        RequestError if `names` cannot be removed."""
        for name in names:
            if name not in self._workers:
                raise self._unknown(name)
        gone = {*names, *(name for leaving in self._leaving for name in leaving.workers)}
        asked = ", ".join(names)
        try:
            rest = self._availability.topology.without(gone)
        except ValueError:
            raise RequestError(
                f"{asked} cannot be removed: no worker, or only one half of pairs, would be left", status=409
            ) from None
        if not rest.complete(self._availability.staying() - gone):
            message = f"{asked} cannot be removed now: the other workers cannot serve (yet); try again"
            raise RequestError(message, status=409)
        return rest

    def add(self, event: AddWorkers, now: float) -> None:
        self.added += len(event.workers)
        self._supervisor.add(event.workers, now)

    def remove(self, event: RemoveWorkers, now: float) -> None:
        """Begin to remove workers; their waiting requests are placed elsewhere. A repeated removal sets a new
        time."""
        names = frozenset(event.workers)
        others = (replace(leaving, workers=leaving.workers - names) for leaving in self._leaving)
        self._leaving = [leaving for leaving in others if leaving.workers]
        self._leaving.append(Leaving(names, now + event.within))
        for name in event.workers:
            self._workers[name].draining = self._workers[name].leaving = True
        self._availability.arrange(self._availability.topology)
        self._dispatcher.place_waiting(now)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Move the requests of workers whose time is up, while others can serve."""
        for leaving in self._leaving:
            if now >= leaving.until and self._availability.placing.complete(self._availability.staying()):
                self._move(leaving.workers, now)

    def sweep(self, now: float) -> None:
        """Remove the leaving workers that are idle. If the others could not serve without them one by one,
        but can without all of them (the last prefill and decode workers of a mixed fleet), remove them
        together."""
        idle = [leaving for leaving in self._leaving if self._idle(leaving.workers)]
        for group in (*([leaving] for leaving in idle), idle):
            there = [leaving for leaving in group if leaving in self._leaving]
            names = frozenset(name for leaving in there for name in leaving.workers)
            if names and self._complete_without(names):
                self._leaving = [leaving for leaving in self._leaving if leaving not in there]
                self._retire(names, now)

    def _complete_without(self, names: Container[str]) -> bool:
        """Return whether the other workers form a topology."""
        try:
            self._availability.topology.without(names)
        except ValueError:
            return False
        return True

    def _add_refusal(self, names: Collection[str]) -> RequestError | None:
        started, bound = self._config.topology, self._config.workers
        roles = {name.rpartition("-")[0] for name in names}
        if "unified" in roles and not started.unified:
            return RequestError("this server was started without unified workers: add a pair", field="role")
        if roles & {*PAIR_ROLES} and not started.prefill:
            return RequestError("this server was started without stream pairs: add unified", field="role")
        if len(self._workers) + len(names) > bound:
            there = f"{len(self._workers)} of at most {bound} workers"
            return RequestError(
                f"{there} are running: start the server with a larger --max-workers", status=409
            )
        return None

    def _move(self, workers: Collection[str], now: float) -> None:
        for request in list(self._dispatcher.requests.values()):
            if not request.workers.isdisjoint(workers):
                self.moved += 1
                self._dispatcher.withdraw(request)
        for name in {copy for worker in workers for copy in self._transfers.copies.of(worker)}:
            self._transfers.end_copy(name, False, now)
        self._dispatcher.place_waiting(now)

    def _idle(self, workers: Collection[str]) -> bool:
        """Return whether no request, trial or transfer involves these workers."""
        if not all(self._workers[name].idle for name in workers):
            return False
        trial = self._quarantine.trial
        if trial and not trial.workers.isdisjoint(workers):
            return False
        if any(not request.workers.isdisjoint(workers) for request in self._dispatcher.requests.values()):
            return False
        return not any(self._transfers.involve(name) for name in workers)

    def _retire(self, workers: Sequence[str] | frozenset[str], now: float) -> None:
        self.removed += len(workers)
        for name in sorted(workers):
            self._placement.view.forget(name)
            self._adapters.lost(name)
            self._transfers.lose(name, now, self._workers[name].incarnation)
        self._supervisor.remove(sorted(workers))
        if not self._quarantine.workers.isdisjoint(workers):
            self._quarantine.moves(self._availability.topology.candidates()[0])
