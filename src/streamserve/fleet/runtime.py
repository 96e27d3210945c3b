"""A running Fleet as the API server uses it: clients submit, edit and cancel requests; operators wait until
it is ready, drain workers and read incident counters. `driver` executes the Fleet's commands.

clients ── submit, edit, cancel ──▶ FleetRuntime ──▶ FleetDriver ◀══▶ worker processes
  ◀─────── Mailboxes ◀──────────────────────────────┘
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence

import msgspec

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.driver import FleetDriver, WorkerSettings
from streamserve.fleet.events import (
    AddAdapter,
    AddWorkers,
    ClientEdit,
    Close,
    Drain,
    Open,
    Refuse,
    RemoveAdapter,
    RemoveWorkers,
)
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.launcher import MachineState, MakeLauncher
from streamserve.fleet.local_launcher import LocalLauncher
from streamserve.fleet.mailbox import Mailboxes
from streamserve.fleet.tracing.recorder import Recorder
from streamserve.protocol.adapters import Adapter
from streamserve.protocol.errors import CheckpointError, FleetError, RequestError, StartError
from streamserve.protocol.messages import Event
from streamserve.protocol.reports import IncidentReport

logger = logging.getLogger(__name__)


class FleetRuntime:
    """Runs a Fleet in the current event loop. Use as an async context manager, or `start` and `close`."""

    def __init__(
        self,
        config: FleetConfig,
        settings: WorkerSettings,
        recorder: Recorder | None = None,
        launcher: MakeLauncher = LocalLauncher,
    ) -> None:
        self.fleet = Fleet(config)
        self._make_launcher = launcher
        self._recorder = recorder
        self._settings = settings
        self._clients = Mailboxes()
        self._failure: FleetError | None = None
        self._changed = asyncio.Event()
        self._closing = False
        self._driver: FleetDriver | None = None

    async def start(self) -> None:
        """Bind the socket and start the workers; return before they are ready."""
        self._driver = FleetDriver(
            self.fleet, self._clients, self._settings, self._make_launcher, self._recorder,
            self._changed.set, self._give_up,
        )  # fmt: skip
        await self._driver.start()

    async def close(self) -> None:
        """Stop the workers and free all resources; idempotent. Open requests end with an error."""
        if self._closing:
            return
        self._closing = True
        self._clients.refuse_all(_shutting_down())
        if self._driver:
            await self._driver.close()
        if self._recorder:
            try:
                await asyncio.to_thread(self._recorder.close)
            except RuntimeError:  # the interpreter is shutting down and starts no more threads
                self._recorder.close()

    async def __aenter__(self) -> "FleetRuntime":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def driver(self) -> FleetDriver:
        """The fleet's driver, once it has been started."""
        assert self._driver is not None, "the runtime has not been started"
        return self._driver

    def machines(self) -> Sequence[MachineState]:
        """Return the machines that can run workers now; none before the start."""
        return self._driver.launcher.machines() if self._driver else ()

    def waiting(self) -> Sequence[str]:
        """Return the names of workers whose start waits for a machine."""
        return self._driver.launcher.waiting() if self._driver else ()

    def process_id(self, worker: str) -> int:
        """Return the id of a worker's present process."""
        return self.driver.processes.pid(worker)

    async def until_ready(self) -> None:
        """Wait until the workers are ready. Raises CheckpointError if a worker cannot serve its model,
        StartError if it cannot start for another reason, FleetError if the runtime itself failed."""
        while not self.fleet.health()[0]:
            if self._failure:
                raise self._failure
            for failure in (worker.failure for worker in self.fleet.workers.values()):
                if failure:
                    raise (CheckpointError if failure.code == 2 else StartError)(failure.error)
            if not self.fleet.availability.can_serve:
                raise StartError(self.fleet.health()[1])
            self._changed.clear()
            await self._changed.wait()

    async def until_failed(self) -> None:
        """Wait until the runtime fails. Raises FleetError."""
        while self._failure is None:
            self._changed.clear()
            await self._changed.wait()
        raise self._failure

    def incidents(self) -> IncidentReport:
        """Return the incident counters so far."""
        driver, recorder = self._driver, self._recorder
        return msgspec.structs.replace(
            self.fleet.incidents(),
            crash_reports=driver.crash_reports if driver else 0,
            observer_failures=(driver.observer_failures if driver else 0)
            + (recorder.failures if recorder else 0),
        )

    async def submit(self, request: Open) -> AsyncGenerator[list[Event], None]:
        """Yield the events of one request as they arrive; the first item is an empty list, once the request
        is accepted. Raises RequestError if the request is refused or lost. Closing the generator early
        cancels the request."""
        if self._closing:
            raise _shutting_down()
        if self._failure:
            raise RequestError(str(self._failure), status=500)
        if request.request in self._clients:
            raise RequestError(f"request id {request.request} is in use", status=409)
        done = False
        try:
            with self._clients.open(request.request) as mailbox:
                await self.driver.handle(request)
                if mailbox.empty():
                    yield []
                while not done:
                    message = await mailbox.get()
                    if isinstance(message, Refuse):
                        done = not mailbox.overflowed
                        raise message.error
                    done = message.last
                    yield message.events
        finally:
            if not done:
                await self.cancel(request.request)

    async def edit(self, edit: ClientEdit) -> None:
        """Edit the prompt of an open request; its events continue in its `submit`. Raises RequestError, and
        changes nothing, if there is no such request, if its prompt is complete, or if the edit does not fit
        the prompt."""
        error = self.fleet.edit_refusal(edit)
        if error:
            raise error
        await self.driver.handle(edit)

    async def drain(self, worker: str, draining: bool) -> int:
        """Start or end draining a worker. Return the number of open requests at the worker or at its partner
        in a pair. Raises RequestError if there is no such worker."""
        if worker not in self.fleet.workers:
            names = ", ".join(self.fleet.workers)
            raise RequestError(f"there is no worker {worker!r}; there are {names}", status=404)
        if self.fleet.workers[worker].leaving:
            raise RequestError(f"worker {worker} is being removed: add one instead", status=409)
        await self.driver.handle(Drain(worker, draining))
        return self.fleet.open_at(worker)

    async def add_workers(self, names: tuple[str, ...]) -> None:
        """Start further workers, which get requests once they are ready. Raises RequestError if they cannot
        be added; in that case no worker is added."""
        self.fleet.scaling.after_adding(names)
        await self.driver.handle(AddWorkers(names))

    async def remove_workers(self, names: tuple[str, ...], within: float) -> int:
        """Remove workers once they have no requests; requests that still run after `within` seconds continue
        at other workers. Return the number of open requests at the removed workers. Raises RequestError if
        the workers cannot be removed; in that case no worker is removed."""
        self.fleet.scaling.after_removing(names)
        await self.driver.handle(RemoveWorkers(names, within))
        requests = self.fleet.requests.values()
        return sum(not request.workers.isdisjoint(names) for request in requests)

    @property
    def adapters(self) -> frozenset[str]:
        """The fingerprints of the LoRA adapters that workers have or load."""
        return frozenset(self.fleet.adapters.adapters)

    async def load_adapter(self, adapter: Adapter) -> str:
        """Load a LoRA adapter at all workers, and wait for their answers. Return why it cannot be served; ""
        if it can."""
        await self.driver.handle(AddAdapter(adapter))
        return await self.adapter_settled(adapter.fingerprint)

    async def adapter_settled(self, fingerprint: str) -> str:
        """Wait until the workers have answered whether they have an adapter; return the error, or "". Raises
        FleetError if the runtime fails meanwhile."""
        while state := self.fleet.adapters.adapters.get(fingerprint):
            if state.settled:
                return state.error
            if self._failure:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        return "the adapter has been unloaded"

    async def unload_adapter(self, fingerprint: str) -> None:
        """Unload a LoRA adapter as soon as no open request uses it."""
        if self._driver is None:
            # Before the start no worker has it: the command needs no driver.
            self.fleet.handle(RemoveAdapter(fingerprint), time.monotonic())
        else:
            await self._driver.handle(RemoveAdapter(fingerprint))

    async def cancel(self, request: str, choice: int | None = None) -> None:
        """Cancel a request, or one of its choices; a no-op if the request is over."""
        await self.driver.handle(Close(request, choice))

    def _give_up(self, error: Exception) -> None:
        """Handle an unrecoverable failure: refuse all requests and report the failure to the caller of
        `until_failed`."""
        logger.critical("the fleet failed", exc_info=error)
        self._failure = FleetError(f"the server failed: {type(error).__name__}")
        self._clients.refuse_all(RequestError(str(self._failure), status=500))
        self._changed.set()


def _shutting_down() -> RequestError:
    return RequestError("the server is shutting down", status=503, retry_after=5.0)
