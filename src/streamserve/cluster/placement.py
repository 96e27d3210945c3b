"""On which agent a worker is started: the halves of a pair on one machine, where they can share memory,
others on the machine with the most free slots."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """An agent of a machine, with `slots` for workers, and the `workers` that it runs."""

    machine: str
    slots: int
    workers: Collection[str]

    @property
    def free(self) -> int:
        """How many more workers it can run."""
        return self.slots - len(self.workers)


def partner(worker: str) -> str:
    """Return the name of the other half of a worker's pair."""
    role, _, number = worker.rpartition("-")
    other = {"prefill": "decode", "decode": "prefill"}.get(role, "")
    return f"{other}-{number}" if other else ""


def choose(worker: str, places: Sequence[Place]) -> int | None:
    """Return the index of the place for a worker; None if there is no free slot."""
    free = [number for number, place in enumerate(places) if place.free > 0]
    if not free:
        return None
    other = partner(worker)
    with_partner = {place.machine for place in places if other and other in place.workers}
    space: Mapping[str, int] = {
        place.machine: sum(each.free for each in places if each.machine == place.machine) for place in places
    }
    return max(free, key=lambda n: (places[n].machine in with_partner, space[places[n].machine], -n))
