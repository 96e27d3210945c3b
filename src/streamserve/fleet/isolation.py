"""Trials of suspects (quarantine.py) as the fleet carries them out: when one begins, at which place, and what
has to leave that place."""

from collections.abc import Callable, Iterator

from streamserve.fleet.events import Command, Lost
from streamserve.fleet.quarantine import Quarantine, Trial
from streamserve.fleet.requests import OpenRequest
from streamserve.fleet.supervisor import Crew
from streamserve.protocol.errors import RequestError


class Isolation:
    """Holds the trials of `quarantine` among the open `requests`. `withdraw` takes a request from its
    workers, to go on later; `place_waiting` sends all that are at no worker to where they may go now."""

    def __init__(
        self,
        quarantine: Quarantine,
        crew: Crew,
        requests: dict[str, OpenRequest],
        withdraw: Callable[[OpenRequest], Iterator[Command]],
        place_waiting: Callable[[float], Iterator[Command]],
    ) -> None:
        self._quarantine = quarantine
        self._crew = crew
        self._requests = requests
        self._withdraw = withdraw
        self._place_waiting = place_waiting

    def advance(self, now: float) -> Iterator[Command]:
        """Begin the next trial where its place is ready; without suspects, let the others in."""
        held = bool(self._quarantine.place)
        group = self._quarantine.next(self._requests)
        if group is None or now < self._quarantine.recess_until:
            if held and not self._quarantine.reserved(now):
                yield from self._place_waiting(now)
            return
        place = self._place()
        if not self._crew.whole(place):
            return
        self._quarantine.begin(place, now)
        for request in list(self._requests.values()):
            if request.workers & place:
                yield from self._withdraw(request)
        yield from self._place_waiting(now)

    def tick(self, now: float) -> Iterator[Command]:
        """Time has passed: a trial that others have waited for too long gives way."""
        trial = self._quarantine.trial
        if trial and trial.overdue(now) and self._held_up(trial):
            for name in self._quarantine.suspend(now):
                if name in self._requests:
                    yield from self._withdraw(self._requests[name])
            yield from self._place_waiting(now)
        yield from self.advance(now)

    def _place(self) -> frozenset[str]:
        """Where suspects are tried: at the place of the first death, unless it does not come up."""
        serving, place = self._crew.serving(), self._quarantine.place
        others = (other for other in self._crew.topology.places() if serving.issuperset(other))
        return place if serving.issuperset(place) else next(others, place)

    def _held_up(self, trial: Trial) -> bool:
        """Whether requests wait for the end of a trial that they are no part of."""
        waiting = (name for name, request in self._requests.items() if request.worker is None)
        return any(name not in trial.group.members and not self._quarantine.waits(name) for name in waiting)


def conviction(request: OpenRequest, event: Lost) -> RequestError:
    """What the client of a request is told that ends every worker it comes to."""
    how = f"{request.tries} times while it ran alone" if request.tries else f"in {request.strikes} steps"
    phase = f", in phase {event.phase}" if event.phase else ""
    where = f"; crash report {event.report}" if event.report else ""
    message = f"request {request.name} ended its worker {how}{phase}: {event.reason}{where}"
    return RequestError(message, status=500)
