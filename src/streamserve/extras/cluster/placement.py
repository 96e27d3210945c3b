"""The choice of an agent for a worker: the halves of a pair run on one machine, where they can share memory;
other workers run on the machine with the most free slots."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AgentCandidate:
    """An agent of a `machine` with `slots` for workers, of which it runs `workers`. `kept` are workers of
    another head that it still runs. `made_for` is the worker for which it was created, or ""."""

    machine: str
    slots: int
    workers: Collection[str]
    kept: Sequence[str] = ()
    made_for: str = ""

    @property
    def free(self) -> int:
        """The number of further workers that the agent can run."""
        return self.slots - len(self.workers)


def role_of(worker: str) -> str:
    """Return the role in a worker's name."""
    return worker.rpartition("-")[0]


def without_kept(kept: Sequence[str], worker: str) -> list[str]:
    """Return the kept workers without the one that `worker` most likely continues."""
    same = [name for name in kept if name == worker]
    alike = same or [name for name in kept if role_of(name) == role_of(worker)]
    return [name for name in kept if name not in alike[:1]]


def partner(worker: str) -> str:
    """Return the name of the other half of a worker's pair."""
    role, _, number = worker.rpartition("-")
    other = {"prefill": "decode", "decode": "prefill"}.get(role, "")
    return f"{other}-{number}" if other else ""


def choose(worker: str, places: Sequence[AgentCandidate], waiting: Iterable[str] = ()) -> int | None:
    """Return the index of the place for a worker; None if there is no free slot.

    - First comes a place with a kept worker of the same name or role, then a place that was made for the
      worker.
    - Slots are reserved for `waiting` workers if they have a kept worker like them, or if the place was made
      for them.
    """
    others = [name for name in waiting if name != worker]
    free = [number for number, place in enumerate(places) if _has_space(worker, place, others)]
    if not free:
        return None
    other = partner(worker)
    with_partner = {place.machine for place in places if other and other in place.workers}
    space: Mapping[str, int] = {
        place.machine: sum(each.free for each in places if each.machine == place.machine) for place in places
    }
    return max(
        free,
        key=lambda n: (
            worker in places[n].kept,
            role_of(worker) in map(role_of, places[n].kept),
            places[n].made_for == worker,
            places[n].machine in with_partner,
            space[places[n].machine],
            -n,
        ),
    )


def _has_space(worker: str, place: AgentCandidate, others: Sequence[str]) -> bool:
    """Return whether a place has a free slot for a worker. Slots that are reserved for the `others` do not
    count: slots of kept workers with their roles, and a place that was made for one of them."""
    kept, roles = Counter(map(role_of, place.kept)), Counter(map(role_of, others))
    if kept[role_of(worker)]:
        return place.free > 0
    reserved = sum(min(count, roles[role]) for role, count in kept.items())
    return place.free > max(reserved, place.made_for in others)
