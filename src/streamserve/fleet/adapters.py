"""The LoRA adapters of a fleet: which worker has which, and when the workers may forget one.

AddAdapter, Ready ──▶ AdapterBook ──▶ LoadAdapter to the workers    a worker that starts loads all of them,
AdapterLoaded     ──▶                                               before it gets any request
RemoveAdapter     ──▶             ──▶ UnloadAdapter, once no open request needs it
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from streamserve.fleet.events import Command, Send
from streamserve.fleet.requests import OpenRequest
from streamserve.fleet.worker_state import WorkerState
from streamserve.protocol.adapters import Adapter
from streamserve.protocol.messages import AdapterLoaded, LoadAdapter, UnloadAdapter


@dataclass
class AdapterState:
    """An adapter in the folder `path`. `waiting` are the workers that have not answered yet, `loaded` the
    workers that have it, `failed` those that could not load it: its files may have changed before they were
    restarted. `error` is why. An adapter that is `leaving` takes no new requests."""

    path: str
    waiting: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    error: str = ""
    leaving: bool = False

    @property
    def settled(self) -> bool:
        """Whether all workers that serve have answered."""
        return bool(self.error) or (bool(self.loaded) and not self.waiting)


class AdapterBook:
    """The adapters of `workers`, by the hash of their files. The `given` adapters are loaded from the
    start. Messages to workers are appended to `commands`."""

    def __init__(
        self, given: Iterable[Adapter], workers: Mapping[str, WorkerState], commands: list[Command]
    ) -> None:
        self._workers = workers
        self._commands = commands
        self.adapters = {adapter.fingerprint: AdapterState(adapter.path) for adapter in given}

    def serves(self, fingerprint: str) -> bool:
        """Return whether new requests may use this adapter; "" stands for the base model."""
        state = self.adapters.get(fingerprint)
        return not fingerprint or (state is not None and not state.leaving)

    def lacking(self, fingerprint: str) -> tuple[frozenset[str], ...]:
        """Return sets of workers to avoid for requests with an adapter, the best first: workers that do not
        have it now, and workers that could not load it. Empty for the base model."""
        state = self.adapters.get(fingerprint)
        if state is None:
            return ()
        return frozenset(state.waiting | state.failed), frozenset(state.failed)

    def add(self, adapter: Adapter) -> None:
        """Load an adapter at all workers that are ready and do not have it."""
        state = self.adapters.setdefault(adapter.fingerprint, AdapterState(adapter.path))
        state.leaving, state.error, state.path = False, "", adapter.path
        for name, worker in self._workers.items():
            if worker.ready and name not in state.loaded | state.waiting:
                self._load(name, adapter.fingerprint)

    def joined(self, worker: str) -> None:
        """Load all adapters at a worker that has become ready."""
        for fingerprint in self.adapters:
            self._load(worker, fingerprint)

    def answered(self, worker: str, answer: AdapterLoaded) -> None:
        """Record a worker's answer."""
        state = self.adapters.get(answer.fingerprint)
        if state is None or worker not in state.waiting:
            return
        state.waiting.discard(worker)
        if answer.error:
            state.error = answer.error
            state.failed.add(worker)
        else:
            state.loaded.add(worker)

    def lost(self, worker: str) -> None:
        """Record that a worker's process has ended."""
        for state in self.adapters.values():
            state.waiting.discard(worker)
            state.loaded.discard(worker)
            state.failed.discard(worker)

    def remove(self, fingerprint: str) -> None:
        """Accept no new requests for an adapter; `sweep` unloads it."""
        if fingerprint in self.adapters:
            self.adapters[fingerprint].leaving = True

    def sweep(self, requests: Iterable[OpenRequest]) -> None:
        """Unload the removed adapters that no open request uses."""
        leaving = {fingerprint for fingerprint, state in self.adapters.items() if state.leaving}
        if not leaving:
            return
        for fingerprint in leaving - {request.opened.adapter for request in requests}:
            state = self.adapters.pop(fingerprint)
            for worker in sorted(state.loaded | state.waiting):
                self._commands.append(Send(worker, UnloadAdapter(fingerprint)))

    def _load(self, worker: str, fingerprint: str) -> None:
        state = self.adapters[fingerprint]
        state.waiting.add(worker)
        state.failed.discard(worker)
        self._commands.append(Send(worker, LoadAdapter(fingerprint, state.path)))
